"""Fixtures: vocabularies of tiny checkpoints."""

from pathlib import Path

import pytest

from services.tokenizer.text.vocabulary import Vocabulary
from tests.unit.tokenizer.checkpoints import byte_fallback, byte_level, write_checkpoint


@pytest.fixture(scope="session")
def byte_level_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(_directory(tmp_path_factory, "byte_level"))


@pytest.fixture(scope="session")
def byte_fallback_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(_directory(tmp_path_factory, "byte_fallback"))


@pytest.fixture(scope="session", params=["byte_level", "byte_fallback"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    """Return a vocabulary of each kind in turn."""
    found: Vocabulary = request.getfixturevalue(f"{request.param}_vocabulary")
    return found


def _directory(factory: pytest.TempPathFactory, kind: str) -> Path:
    tokenizer = byte_level() if kind == "byte_level" else byte_fallback()
    return write_checkpoint(factory.mktemp("checkpoints") / kind, tokenizer)
