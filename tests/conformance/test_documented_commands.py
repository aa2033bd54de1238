"""Commands and programs of the documentation, run as a reader pastes them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stack import Stack, served_stack
from tests.text_models import make_embedder

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {
    "make serve": "does not end; tests/conformance/test_serve.py has its flags",
    "tokenwire serve": "does not end",
    "python -m services.": "does not end",
    "torchrun ": "does not end",
    "kubectl ": "needs a cluster; tests/unit/deploy checks the manifests",
    "envoy -c ": "does not end; tests/services/test_envoy.py runs it",
    "docker compose up": "tests/container runs it",
    "MODEL=$HOME/Qwen2.5-Coder-0.5B ": "needs a downloaded model",
    ".venv/bin/tokenwire pull": "needs the network",
    "tokenwire pull": "needs the network; tests/unit/common/model_files/test_hub.py has a hub",
    'pip install "tokenwire': "tests/conformance/test_wheel.py installs a wheel",
    ".venv/bin/pip install": "needs the network",
    ".venv/bin/python -m benchmarks": "takes long",
    ".venv/bin/python examples/mcp_server.py": "does not end; tests/browser/test_mcp.py runs it",
    "systemd-run ": "needs systemd and a model that is larger than memory",
    "tokenwire chat --image": "needs a vision-language model",
    "tokenwire keys revoke": "its key is made up",
    "smg launch": "does not end; tests/conformance/test_smg.py runs it",
    "VLLM_ROUTER_TOKENIZER=": "does not end; tests/conformance/test_vllm_router.py runs it",
}
"""Beginnings of lines that are left out, with the reason"""


def blocks() -> Iterator[tuple[str, str, str]]:
    """Yield name, language and text of each block of shell or Python."""
    for page in PAGES:
        found = re.finditer(r"^```(sh|python)\n(.*?)^```", page.read_text(), re.M | re.S)
        for number, match in enumerate(found):
            yield f"{page.name}-{number}", match[1], match[2]


def runnable(text: str) -> str:
    """Return the lines of shell that can be run here."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(tuple(NOT_RUN)))


EMBEDS = "embeddings.md"
"""Page whose commands need a model that embeds"""
RUN = [each for each in blocks() if each[1] == "python" or runnable(each[2]).strip()]


@pytest.fixture(scope="module")
def embedding_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = make_embedder(tmp_path_factory.mktemp("embedder"))
    logs = tmp_path_factory.mktemp("logs")
    with served_stack(model, logs, "--model", str(model)) as stack:
        yield stack


@pytest.mark.parametrize(("name", "language", "text"), RUN, ids=[each[0] for each in RUN])
def test_block_runs_as_pasted(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, language: str, text: str
) -> None:
    embeds = name.startswith(EMBEDS)
    stack: Stack = request.getfixturevalue("embedding_stack" if embeds else "stack")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / ".curlrc").write_text("fail-with-body\nsilent\nshow-error\n")
    for documented, actual in (
        ("http://127.0.0.1:8000", stack.url),
        ("127.0.0.1:50051", stack.tokenizer),
        ("127.0.0.1:50052", stack.engine),
    ):
        text = text.replace(documented, actual)
    shell = ["bash", "-euo", "pipefail", "-c", runnable(text)]
    scripts = f"{sys.prefix}/bin:{os.environ['PATH']}"
    of_reader = {
        "TOKENWIRE_TARGET": stack.tokenizer,
        "TOKENWIRE_URL": stack.url,
        "KEY": "none",
        "CURL_HOME": str(tmp_path),
    }
    ran = subprocess.run(
        shell if language == "sh" else [sys.executable, "-c", text],
        cwd=tmp_path,
        env=os.environ | of_reader | {"PATH": scripts},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.strip(), "the reader sees nothing"


def test_lines_that_are_left_out_are_documented() -> None:
    """Whoever removes a command removes its line here, so that no new one hides behind it."""
    lines = [
        line for _, language, text in blocks() if language == "sh" for line in text.split("\n")
    ]
    assert [start for start in NOT_RUN if not any(each.startswith(start) for each in lines)] == []
