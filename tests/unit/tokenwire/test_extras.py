"""The command that a message names for a missing package works in a checkout and with a wheel."""

import shlex
import subprocess
import sys

import pytest

from tokenwire import extras
from tokenwire.extras import install_command


@pytest.mark.parametrize(
    ("extra", "packages"),
    [
        ("redis", {"redis"}),
        ("otel", {"opentelemetry-exporter-otlp-proto-grpc", "opentelemetry-sdk"}),
        ("vllm_api", {"smg-grpc-proto", "tokenizers", "msgspec"}),
        ("all", {"torch", "starlette", "llguidance", "pypdf"}),
    ],
)
def test_command_names_packages_of_the_index(
    monkeypatch: pytest.MonkeyPatch, extra: str, packages: set[str]
) -> None:
    monkeypatch.setattr(extras, "_is_installed", lambda name: False)
    python, *command, end = shlex.split(install_command(extra) + " end")
    assert (python, command[:3], end) == (sys.executable, ["-m", "pip", "install"], "end")
    named = {each.partition(">")[0].partition("<")[0].partition("=")[0] for each in command[3:]}
    assert packages <= named
    assert not [each for each in named if each.startswith("tokenwire")]


def test_command_leaves_out_what_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_is_installed", lambda name: name != "smg-grpc-proto")
    [package] = shlex.split(install_command("vllm_api"))[4:]
    assert package.startswith("smg-grpc-proto")


def test_command_of_a_client_says_in_one_sentence_what_a_server_needs() -> None:
    """A wheel without extras has the command, but none of the services' packages."""
    program = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "from tokenwire.cli import main\nmain(['serve'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2
    assert ran.stderr.count("\n") == 1
    assert "prometheus_client is not installed." in ran.stderr
    assert "-m pip install " in ran.stderr
