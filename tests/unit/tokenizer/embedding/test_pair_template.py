"""Prompts of rerankers that read a pair of texts as a question."""

import pytest

from services.tokenizer.embedding.pair_template import PairTemplate
from services.tokenizer.text.vocabulary import Vocabulary
from tests.text_models import make_scorer

TEMPLATE = "what: {query}, key: {document}. is the lock?"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(make_scorer(tmp_path_factory.mktemp("pairs") / "scorer"))


@pytest.fixture
def template() -> PairTemplate:
    found = PairTemplate.among({"rerank": TEMPLATE})
    assert found is not None
    return found


def test_both_texts_stand_in_their_places(vocabulary: Vocabulary, template: PairTemplate) -> None:
    """A query that contains the mark of the document stays as it is."""
    text = TEMPLATE.replace("{document}", "fruit").replace("{query}", "a {document}")
    expected = vocabulary.encode(text, add_special_tokens=False)
    assert template.encode(vocabulary, "a {document}", "fruit", 64) == expected


def test_end_of_the_prompt_stays_when_a_document_is_cut(
    vocabulary: Vocabulary, template: PairTemplate
) -> None:
    """The model answers behind it."""
    whole = vocabulary.encode(template.after, add_special_tokens=False)
    ids = template.encode(vocabulary, "a", "fruit " * 60, 40)
    assert len(ids) == 40
    assert list(ids[-len(whole) :]) == whole


@pytest.mark.parametrize("text", ["", "{query}", "{document} {query}"])
def test_template_needs_both_places(text: str) -> None:
    assert PairTemplate.among({"rerank": text}) is None
