"""`tokenwire serve`: what it starts, and how it refuses to."""

import dataclasses
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenwire.supervisor import Layout, ServeError, plan


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tokenwire", "serve", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def assert_refused(result: subprocess.CompletedProcess[str], *said: str) -> None:
    """One sentence on stderr, nothing on stdout, exit code 2."""
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    for words in said:
        assert words in result.stderr


def test_a_wrong_model_directory_is_one_sentence(tmp_path: Path) -> None:
    assert_refused(serve("--model", str(tmp_path / "none")), "none does not exist")
    assert_refused(serve("--model", str(tmp_path)), "no config.json")


def test_a_busy_port_is_one_sentence(checkpoint: Path, taken_port: int) -> None:
    said = ("engine port", str(taken_port), "already in use")
    assert_refused(serve("--model", str(checkpoint), "--engine-port", str(taken_port)), *said)


def test_a_bad_port_is_one_sentence(checkpoint: Path) -> None:
    model = ("--model", str(checkpoint))
    assert_refused(serve(*model, "--port", "70000"), "between 1 and 65535")
    assert_refused(serve(*model, "--port", "50051"), "both 50051")


def test_an_unknown_host_is_one_sentence(checkpoint: Path) -> None:
    assert_refused(serve("--model", str(checkpoint), "--host", "no.such.invalid"), "not known")


def test_each_service_is_told_where_the_next_one_is(checkpoint: Path) -> None:
    layout = Layout(host="0.0.0.0", port=1, model=checkpoint, engine_args="--kv-memory '1 GiB'")
    shim, tokenizer, engine, grammar = plan(layout)
    assert [service.name for service in (shim, tokenizer, engine, grammar)] == [
        "http_shim",
        "tokenizer",
        "engine",
        "grammar",
    ]
    for service, flag, target in (
        (shim, "--tokenizer", tokenizer.target),
        (tokenizer, "--engine", engine.target),
        (engine, "--grammar", grammar.target),
    ):
        assert service.arguments[service.arguments.index(flag) + 1] == target
        assert target.startswith("127.0.0.1:")
    assert engine.arguments[-2:] == ("--kv-memory", "1 GiB")
    assert "0.0.0.0" not in grammar.arguments  # it is nobody's way in


def test_the_server_is_opened_only_when_asked(checkpoint: Path) -> None:
    layout = Layout(model=checkpoint)
    assert "--open" not in plan(layout)[0].arguments
    assert "--open" in plan(dataclasses.replace(layout, open=True))[0].arguments


def test_unreadable_engine_arguments_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ServeError, match="engine's arguments"):
        plan(Layout(model=checkpoint, engine_args="--kv-memory '1"))


def test_a_service_that_can_not_start_says_why(checkpoint: Path, unused_ports: list[int]) -> None:
    """The sentence of the service is the sentence of the command."""
    http, tokenizer, engine, grammar = map(str, unused_ports)
    result = serve(
        "--model", str(checkpoint), "--log-dir", str(checkpoint / "logs"),
        "--port", http, "--tokenizer-port", tokenizer,
        "--engine-port", engine, "--grammar-port", grammar,
    )  # fmt: skip
    assert_refused(result, "tokenwire: ")
