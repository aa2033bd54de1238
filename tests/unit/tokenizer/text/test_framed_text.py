"""Texts and pairs with the special tokens around them, cut as transformers cuts them."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from services.tokenizer.text.vocabulary import Vocabulary
from tests.text_models import make_embedder

SHORT, LONG = "a lock", "what is the key, a mutex? the locks is a fruit."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def vocabulary(model: Path) -> Vocabulary:
    return Vocabulary(model)


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(model)
    return tokenizer


@pytest.mark.parametrize("most", [3, 5, 8, 100])
@pytest.mark.parametrize("text", [SHORT, LONG])
def test_cut_keeps_the_end_mark(
    vocabulary: Vocabulary, reference: PreTrainedTokenizerBase, text: str, most: int
) -> None:
    [framed] = vocabulary.encode_framed([text])
    expected = reference(text, truncation=True, max_length=most)["input_ids"]
    assert list(framed.cut(most)) == expected


@pytest.mark.parametrize("most", [4, 5, 6, 9, 10, 13, 100])
@pytest.mark.parametrize("pair", [(SHORT, LONG), (LONG, SHORT), (LONG, LONG), (SHORT, SHORT)])
def test_longer_text_of_a_pair_is_cut_first(
    vocabulary: Vocabulary, reference: PreTrainedTokenizerBase, pair: tuple[str, str], most: int
) -> None:
    """As many tokens are left of each text as transformers leaves, give or take one."""
    [framed] = vocabulary.encode_framed([pair])
    expected = reference(*pair, truncation="longest_first", max_length=most)
    mine = framed.cut(most)
    assert len(mine) == len(expected["input_ids"])
    types = expected["token_type_ids"]
    second = framed.second_text(most)
    assert second is not None
    assert abs(second - types.index(1)) <= 1
    if pair == (SHORT, SHORT) or most == 100:
        assert list(mine) == expected["input_ids"]


def test_bare_ends_are_counted(vocabulary: Vocabulary) -> None:
    single, pair = vocabulary.encode_framed(["a"]), vocabulary.encode_framed([("a", "b")])
    assert (single[0].least, pair[0].least) == (2, 3)
    assert single[0].second_text(10) is None
