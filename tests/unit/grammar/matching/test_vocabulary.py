"""A wrong end id would let a model stop in the middle of a grammar, or never."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from services.common.settings import StartupError
from services.grammar.matching.vocabulary import load


def write_tokenizer(directory: Path, special: list[str]) -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))


def test_end_ids_come_from_both_configurations(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<|a|>", "<|b|>", "<|c|>"])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 1]}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    vocabulary = load(tmp_path)
    assert vocabulary.end_ids == (2, 1)
    assert vocabulary.size == 259
    content = (tmp_path / "tokenizer.json").read_bytes()
    assert vocabulary.fingerprint == hashlib.sha256(content).hexdigest()


def test_a_well_known_name_of_the_end_token_suffices(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, ["<|a|>", "<|endoftext|>"])
    assert load(tmp_path).end_ids == (1,)


def test_a_missing_end_token_fails_at_start(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, [])
    with pytest.raises(StartupError, match="which token ends a sequence"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", r"config\.json is not a JSON object\.$"),
        ("{", r"^Can't read .*config\.json"),
        ('{"eos_token_id": "</s>"}', r"config\.json: eos_token_id must be"),
        ('{"eos_token_id": 2.5}', r"config\.json: eos_token_id must be"),
    ],
)
def test_an_invalid_config_fails_at_start(tmp_path: Path, content: str, message: str) -> None:
    write_tokenizer(tmp_path, [])
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(StartupError, match=message):
        load(tmp_path)


def test_an_invalid_tokenizer_file_fails_at_start(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(StartupError, match=r"can't use .*tokenizer\.json"):
        load(tmp_path)


def test_the_compile_process_is_safe_to_fork() -> None:
    """grpc's threads would not survive a fork, and torch would cost memory in every fork."""
    program = (
        "import sys, threading, services.grammar.compiling.compile_process\n"
        "assert not {'grpc', 'torch', 'transformers'} & set(sys.modules)\n"
        "assert threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
