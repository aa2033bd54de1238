"""Tests of the programs in examples/, run as a user runs them."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from google import rpc

from tests.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
GOOGLEAPIS = str(Path(next(iter(rpc.__path__))).parents[1])
"""Folder with google/rpc/*.proto"""
DEBIAN_GO = Path("/usr/share/gocode/src")
"""Folder of Debian's Go packages"""


def run(
    stack: Stack, *command: str, cwd: Path = EXAMPLES, seconds: float = 120, **variables: str
) -> str:
    where = {"BASE_URL": stack.url, "TOKENIZER": stack.tokenizer, "ENGINE": stack.engine}
    where["JOBS"] = stack.jobs
    protos = {"PROTOS": str(ROOT / "protos"), "GOOGLEAPIS": GOOGLEAPIS}
    result = subprocess.run(
        command,
        cwd=cwd,
        env=os.environ | where | protos | variables,
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


def test_grpc_batch_example_prints_an_answer_for_each_line(stack: Stack) -> None:
    output = run(stack, sys.executable, "grpc_batch.py")
    assert {line[:3] for line in output.splitlines() if re.match(r"\d: ", line)} == {"0: ", "1: "}


def test_grpc_tokens_example_prints_the_model_and_16_tokens(stack: Stack) -> None:
    first, *_, last = run(stack, sys.executable, "grpc_tokens.py").splitlines()
    assert first.startswith(f"{stack.model_id}: ")
    assert last == "16 tokens"


def expect_text_ids_and_refusal(output: str, code: str | int) -> None:
    answer = json.loads(output)
    assert answer["text"]
    assert len(answer["ids"]) == 8
    refusal = answer["refusal"]
    assert refusal["code"] == code
    assert refusal["field"] == "sampling.temperature"
    assert re.fullmatch(r"[A-Z][A-Z0-9_]+", refusal["reason"])
    assert "temperature" in refusal["message"]


@pytest.mark.skipif(shutil.which("node") is None, reason="this machine has no Node.js")
def test_node_example_reads_answers_and_errors_with_the_proto_files_alone(
    stack: Stack, tmp_path: Path
) -> None:
    for file in ("package.json", "client.js"):
        shutil.copy(EXAMPLES / "node" / file, tmp_path)
    run(stack, "npm", "install", "--no-audit", "--no-fund", cwd=tmp_path, seconds=300)
    output = run(stack, "node", "client.js", cwd=tmp_path)
    expect_text_ids_and_refusal(output, code="INVALID_ARGUMENT")


@pytest.mark.skipif(
    not (
        shutil.which("protoc-gen-go-grpc") and (DEBIAN_GO / "google.golang.org/protobuf").exists()
    ),
    reason="this machine lacks Debian's Go, or its packages for gRPC",
)
def test_go_example_reads_answers_and_errors_with_the_proto_files_alone(
    stack: Stack, tmp_path: Path
) -> None:
    here = tmp_path / "src" / "tokenwire"
    shutil.copytree(EXAMPLES / "go", here)
    run(stack, "make", cwd=here)
    # Debian's packages stand in for what `go mod tidy` would download.
    debian = {"GO111MODULE": "off", "GOPATH": f"{tmp_path}:{DEBIAN_GO.parent}"}
    output = run(stack, "go", "run", ".", cwd=here, seconds=300, **debian)
    expect_text_ids_and_refusal(output, code="InvalidArgument")


@pytest.mark.skipif(
    not (shutil.which("grpc_cpp_plugin") and Path("/usr/include/grpcpp/grpcpp.h").exists()),
    reason="this machine lacks gRPC's headers for C++",
)
def test_cpp_example_reads_answers_and_errors_with_the_proto_files_alone(
    stack: Stack, tmp_path: Path
) -> None:
    here = tmp_path / "cpp"
    shutil.copytree(EXAMPLES / "cpp", here, ignore=shutil.ignore_patterns("stubs", "*.o", "client"))
    run(stack, "make", "CXXFLAGS=-O0", cwd=here, seconds=300)
    invalid_argument = 3
    expect_text_ids_and_refusal(run(stack, "./client", cwd=here), code=invalid_argument)


def test_guide_quotes_the_examples() -> None:
    """A block of the guide in another language than Python is part of a program that runs."""
    guide = (ROOT / "docs" / "grpc.md").read_text()
    quoted = re.findall(r"^```(js|go|cpp)\n(.*?)^```", guide, re.M | re.S)
    programs = {"js": "node/client.js", "go": "go/client.go", "cpp": "cpp/client.cc"}
    assert {language for language, _ in quoted} == set(programs)
    for language, text in quoted:
        program = [line.strip() for line in (EXAMPLES / programs[language]).open()]
        missing = [line for line in text.splitlines() if line.strip() not in program]
        assert missing == [], programs[language]
