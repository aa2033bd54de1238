"""Tests of the programs in examples/, run as a user runs them."""

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


def test_curl_example_prints_a_completion_an_infill_and_a_stream(stack: Stack) -> None:
    whole, infill, *events = filter(None, run(stack, "bash", "curl.sh").split("\n"))
    assert json.loads(whole)["choices"][0]["text"]
    assert json.loads(infill)["object"] == "text_completion"
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"


def test_openai_sdk_example_prints_the_same_text_whole_and_streamed(stack: Stack) -> None:
    output = run(stack, sys.executable, "openai_sdk.py")
    assert output.strip()
    half = len(output) // 2
    assert output[:half] == output[half:]


def test_client_example_prints_the_same_text_for_text_and_token_ids(stack: Stack) -> None:
    output = run(stack, sys.executable, "client.py")
    assert output.strip()
    half = len(output) // 2
    assert output[:half] == output[half:]


def test_grpc_text_example_prints_a_completion(stack: Stack) -> None:
    assert len(run(stack, sys.executable, "grpc_text.py")) > 1  # more than the final newline


def test_grpc_tokens_example_prints_the_model_and_16_tokens(stack: Stack) -> None:
    first, *_, last = run(stack, sys.executable, "grpc_tokens.py").splitlines()
    assert first.startswith(f"{stack.model_id}: ")
    assert last == "16 tokens"


@pytest.mark.skipif(shutil.which("node") is None, reason="this machine has no Node.js")
def test_node_example_reads_answers_and_errors_with_the_proto_files_alone(
    stack: Stack, tmp_path: Path
) -> None:
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
