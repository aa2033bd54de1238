"""Prompts of sentence-transformers' checkpoints."""

import json
from pathlib import Path
from typing import Any

import pytest
from sentence_transformers import SentenceTransformer

from services.common.settings import StartupError
from services.tokenizer.embedding.sentence_prompts import SentencePrompts
from services.tokenizer.text.vocabulary import Vocabulary
from tests.text_models import make_embedder
from tokenwire.errors import ServiceError


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder"))


def write(embedder: Path, config: object) -> Path:
    (embedder / "config_sentence_transformers.json").write_text(json.dumps(config))
    return embedder


def read(embedder: Path, config: object) -> SentencePrompts:
    return SentencePrompts(write(embedder, config), Vocabulary(embedder))


@pytest.mark.parametrize("text", ["query: ", "what is the key?", "zzz", " "])
def test_length_equals_that_of_sentence_transformers(embedder: Path, text: str) -> None:
    prompt = read(embedder, {"prompts": {"code": text}}).named("code")
    model: Any = SentenceTransformer(str(embedder), device="cpu")
    assert prompt is not None
    assert (prompt.text, prompt.length) == (text, model[0]._get_prompt_length(text))


def test_default_prompt_goes_before_texts_without_a_name(embedder: Path) -> None:
    config = {"prompts": {"code": "key: ", "query": None}, "default_prompt_name": "code"}
    prompts = read(embedder, config)
    assert prompts.named(None) == prompts.named("code") != prompts.named("query")
    assert prompts.named("query") is prompts.named("document") is None
    assert read(embedder, {}).named(None) is None


def test_unknown_name_is_refused_with_the_known_ones(embedder: Path) -> None:
    with pytest.raises(ServiceError, match="query, document, code") as refused:
        read(embedder, {"prompts": {"code": "key: "}}).named("passage")
    assert refused.value.field == "prompt_name"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"prompts": ["query"]}, "texts by name"),
        ({"prompts": {"query": 1}}, "texts by name"),
        ({"default_prompt_name": "code"}, "none of its prompts"),
        ({"default_prompt_name": ["code"]}, "none of its prompts"),
    ],
)
def test_wrong_file_is_refused_at_the_start(embedder: Path, config: object, reason: str) -> None:
    with pytest.raises(StartupError, match=reason):
        read(embedder, config)
