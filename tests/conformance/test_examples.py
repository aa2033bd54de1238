"""The examples, run as a reader would run them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def run(stack: Stack, *command: str, cwd: Path = EXAMPLES, seconds: float = 120) -> str:
    where = {"BASE_URL": stack.url, "TOKENIZER": stack.tokenizer, "ENGINE": stack.engine}
    result = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | where | {"PROTOS": str(ROOT / "protos")},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_curl(stack: Stack) -> None:
    """One completion, one infill, one stream that ends as OpenAI's do."""
    whole, infill, *events = filter(None, run(stack, "bash", "curl.sh").splitlines())
    assert json.loads(whole)["choices"][0]["text"]
    assert json.loads(infill)["object"] == "text_completion"
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


def test_openai_sdk(stack: Stack) -> None:
    """Streamed, the same text comes out."""
    output = run(stack, sys.executable, "openai_sdk.py")
    assert output.strip()
    half = len(output) // 2
    assert output[:half] == output[half:]


def test_own_client(stack: Stack) -> None:
    """Text level and token level agree: the same prompt gives the same text."""
    output = run(stack, sys.executable, "client.py")
    assert output.strip()
    half = len(output) // 2
    assert output[:half] == output[half:]


def test_grpc_text(stack: Stack) -> None:
    assert len(run(stack, sys.executable, "grpc_text.py")) > 1  # more than the last newline


def test_grpc_tokens(stack: Stack) -> None:
    first, *_, last = run(stack, sys.executable, "grpc_tokens.py").splitlines()
    assert first.startswith(f"{stack.model_id}: ")
    assert last == "16 tokens"


@pytest.mark.skipif(shutil.which("node") is None, reason="this machine has no Node.js")
def test_node(stack: Stack, tmp_path: Path) -> None:
    """The .proto files alone make a client in another language, errors included."""
    for file in ("package.json", "client.js"):
        shutil.copy(EXAMPLES / "node" / file, tmp_path)
    run(stack, "npm", "install", "--no-audit", "--no-fund", cwd=tmp_path, seconds=300)
    answer = json.loads(run(stack, "node", "client.js", cwd=tmp_path))
    assert answer["text"]
    assert len(answer["ids"]) == 8
    refusal = answer["refusal"]
    assert refusal["code"] == "INVALID_ARGUMENT"
    assert refusal["field"] == "sampling.temperature"
    assert re.fullmatch(r"[A-Z][A-Z0-9_]+", refusal["reason"])
    assert "temperature" in refusal["message"]
