"""Refusals of `tokenwire serve` before it starts a process: one sentence, and nothing else."""

import json
import shutil
from pathlib import Path

import pytest

from tests.stack import free_ports
from tests.unit.tokenwire.serving.test_stack_layout import assert_refused, serve
from tokenwire.serving.service import Service
from tokenwire.serving.start_check import needed_memory


def ports() -> list[str]:
    names = ("--port", "--tokenizer-port", "--engine-port", "--grammar-port", "--jobs-port")
    pairs = zip(names, map(str, free_ports(5)), strict=True)
    return [word for pair in pairs for word in pair]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--dtype", "fp16"], "engine: --dtype must be one of"),
        (["--engine-args=--kv-memory=lots"], "engine: 'lots' is not an amount of memory"),
        (["--kv-memory", "900TiB"], "engine: --kv-memory 900TiB: "),
        (["--context-length", "long"], "engine: --context-length must be a number"),
        (["--max-logprobs", "100"], "tokenizer: --max-logprobs must be between 0 and 20"),
        (["--compile-timeout", "0"], "grammar: --compile-timeout must be between"),
        (["--fetch-images-from", "x.example"], "http_shim: --fetch-images-from needs"),
        (["--keys", "/nowhere"], "The keys file /nowhere can't be read"),
    ],
)
def test_wrong_flag_of_any_service_is_one_sentence(flags: list[str], reason: str) -> None:
    assert_refused(serve(*ports(), *flags), reason)


def test_architecture_that_is_not_served_is_one_sentence(
    tmp_path: Path, embedded_model: Path
) -> None:
    file = _copy(embedded_model, tmp_path / "model") / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"architectures": ["Unheard"]}))
    refused = serve(*ports(), "--model", str(file.parent))
    assert_refused(refused, "the architecture Unheard is not supported")


def test_error_that_a_service_finds_is_one_sentence_too(
    tmp_path: Path, embedded_model: Path
) -> None:
    """The other services run already: what they say is held back."""
    file = _copy(embedded_model, tmp_path / "model") / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"num_attention_heads": 7}))
    refused = serve(*ports(), "--model", str(file.parent))
    assert_refused(refused, "engine: ", "num_attention_heads")
    template = ("--chat-template", str(tmp_path / "none.jinja"))
    assert_refused(serve(*ports(), *template), "tokenizer: The chat template ")


def test_processes_of_a_large_vocabulary_need_more_memory(
    tmp_path: Path, embedded_model: Path
) -> None:
    """The models of a server on demand would else take more memory than --memory allows."""
    file = _copy(embedded_model, tmp_path / "model") / "config.json"
    flags = ("--model", str(file.parent), "--kv-memory", "256MiB")
    engine, second = (Service("engine", flags, "127.0.0.1:1", replica=each) for each in (1, 2))
    tokenizer = Service("tokenizer", flags[:2], "127.0.0.1:2")
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"vocab_size": 65_536}))
    usual, of_second = needed_memory([tokenizer, engine]), needed_memory([second])
    file.write_text(json.dumps(config | {"vocab_size": 262_144}))
    assert needed_memory([tokenizer, engine]) - usual > 2**29
    assert needed_memory([second]) == of_second, "tokenizers that all engines share"


def _copy(model: Path, target: Path) -> Path:
    shutil.copytree(model, target)
    return target
