"""The command that a message names for a missing package works in a checkout and with a wheel."""

import shlex
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
