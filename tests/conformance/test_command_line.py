"""Tests of the command `tokenwire` with a running stack."""

import base64
import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.stack import Stack

# one white pixel
PIXEL = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGP4//8/AAX+Av4N70a4AAAAAElFTkSuQmCC"
)


def tokenwire(stack: Stack, *arguments: str) -> str:
    command = [sys.executable, "-m", "tokenwire", *arguments, "--target", stack.tokenizer]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_complete_prints_the_same_text_with_and_without_stream(stack: Stack) -> None:
    asked = ("complete", "def add(a, b):", "--max-tokens", "24", "--temperature", "0")
    whole = tokenwire(stack, *asked)
    assert whole.strip()
    assert tokenwire(stack, *asked, "--stream") == whole


def test_complete_repeats_a_seed_and_ends_at_a_stop_string(stack: Stack) -> None:
    asked = ("complete", "import ", "--max-tokens", "32", "--seed", "5", "--stop", "\n")
    first = tokenwire(stack, *asked)
    assert first == tokenwire(stack, *asked)
    assert "\n" not in first.rstrip("\n")


def test_complete_with_a_suffix_prints_the_middle(stack: Stack) -> None:
    asked = ("--suffix", "\n    return total\n", "--max-tokens", "16", "--temperature", "0")
    middle = tokenwire(stack, "complete", "def f(xs):\n", *asked)
    assert middle.strip()
    assert "return total\n" not in middle.removesuffix("\n")


def test_chat_prints_the_same_answer_with_and_without_stream(stack: Stack) -> None:
    asked = ("chat", "Hello!", "--max-tokens", "24", "--temperature", "0")
    whole = tokenwire(stack, *asked)
    assert whole.strip()
    assert "<|" not in whole
    assert tokenwire(stack, *asked, "--stream") == whole
    told = tokenwire(stack, *asked, "--system", "You are a pirate.", "--n", "2").splitlines()
    assert [line for line in told if line.startswith("---")] == ["--- 0", "--- 1"]


def test_complete_prints_a_heading_for_each_choice(stack: Stack) -> None:
    asked = ("complete", "x", "--n", "2", "--max-tokens", "4", "--temperature", "0")
    lines = tokenwire(stack, *asked).splitlines()
    assert [line for line in lines if line.startswith("---")] == ["--- 0", "--- 1"]


def test_refusal_is_one_line_on_stderr_and_exit_code_1(stack: Stack) -> None:
    command = [sys.executable, "-m", "tokenwire", "complete", "x", "--stop", ""]
    result = subprocess.run(
        [*command, "--target", stack.tokenizer],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("tokenwire: --stop: ")
    assert len(result.stderr.splitlines()) == 1


def test_image_for_a_text_only_model_is_one_line_on_stderr(stack: Stack, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(base64.b64decode(PIXEL))
    for command in ("complete", "chat"):
        asked = [sys.executable, "-m", "tokenwire", command, "x", "--image", str(path)]
        result = subprocess.run(
            [*asked, "--target", stack.tokenizer],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert result.returncode == 1
        assert result.stdout == ""
        assert "takes text alone" in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_tokenize_and_models_agree_with_http(stack: Stack) -> None:
    rows = [line.split("\t") for line in tokenwire(stack, "tokenize", "def f").splitlines()]
    body = json.dumps({"prompt": "def f"}).encode()
    request = urllib.request.Request(
        f"{stack.url}/tokenize", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert [int(identity) for identity, _ in rows] == json.load(answer)["tokens"]
    assert tokenwire(stack, "models").startswith(stack.model_id)


def test_health_of_each_running_service_is_exit_code_0(stack: Stack) -> None:
    for target in (stack.tokenizer, stack.engine, stack.grammar, f"{stack.url}/ready"):
        command = [sys.executable, "-m", "tokenwire", "health", target]
        assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_ctrl_c_ends_the_stream_with_exit_code_130(stack: Stack) -> None:
    # The stream is several times larger than the pipe's 4,096 bytes. The command therefore waits
    # for its reader, even if the server is fast.
    command = [sys.executable, "-m", "tokenwire", "complete", "x", "--stream", "--ignore-eos"]
    asked = ("--max-tokens", "1900", "--temperature", "2", "--seed", "1")
    process = subprocess.Popen(
        [*command, *asked, "--target", stack.tokenizer],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # else `read` takes all that is in the pipe
        pipesize=4096,
    )
    assert process.stdout is not None
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 130
    assert b"Traceback" not in complaints


def test_ignore_eos_generates_all_of_max_tokens(stack: Stack) -> None:
    asked = ("complete", "x", "--max-tokens", "1900", "--temperature", "2", "--seed", "1")
    assert len(tokenwire(stack, *asked, "--ignore-eos")) > 4096


def test_tokenize_prints_readable_text_and_escapes_parts_of_characters(stack: Stack) -> None:
    """The vocabulary's own strings, such as "Ã©", mislead a reader."""
    rows = dict(
        line.split("\t")[::-1] for line in tokenwire(stack, "tokenize", "é =\n☺").splitlines()
    )
    assert {"é", " =", "\\n"} <= rows.keys()
    assert any(token.startswith("\\x") for token in rows), rows
    back = tokenwire(stack, "detokenize", *rows.values())
    assert back == "é =\n☺\n"


def test_json_results_agree_with_the_text(stack: Stack) -> None:
    """Scripts read the same results as users."""
    asked = ("--max-tokens", "8", "--temperature", "0")
    for command, prompt in (("complete", "def f("), ("chat", "Hello!")):
        text = tokenwire(stack, command, prompt, *asked)
        whole = json.loads(tokenwire(stack, command, prompt, *asked, "--json"))
        [choice] = whole["choices"]
        said = choice["text"] if command == "complete" else choice["message"]["content"]
        assert f"{said}\n" == text
        lines = tokenwire(stack, command, prompt, *asked, "--json", "--stream").splitlines()
        *deltas, end = map(json.loads, lines)
        key = "text" if command == "complete" else "content"
        assert "".join(delta[key] for delta in deltas) == said
        assert deltas[-1]["finish_reason"] == choice["finish_reason"]
        assert end["model"] == whole["model"] == stack.model_id
        assert end["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    encoded = json.loads(tokenwire(stack, "tokenize", "def f", "--json"))
    ids = list(map(str, encoded["ids"]))
    assert json.loads(tokenwire(stack, "detokenize", *ids, "--json")) == {"text": "def f"}
    [model] = json.loads(tokenwire(stack, "models", "--json"))["models"]
    assert model["id"] == stack.model_id


def test_target_of_another_service_is_named(stack: Stack) -> None:
    """A user who mixes up the ports must learn which one is needed."""
    kinds = {
        stack.engine: "an engine",
        stack.grammar: "a grammar service",
        stack.url.removeprefix("http://"): "an HTTP server",
    }
    for target, kind in kinds.items():
        for asked in (["complete", "x"], ["models"]):
            command = [sys.executable, "-m", "tokenwire", *asked, "--target", target]
            result = subprocess.run(
                command, capture_output=True, text=True, timeout=60, check=False
            )
            assert result.returncode == 1
            assert f"{target} is {kind}" in result.stderr
            assert "50051" in result.stderr
