"""Tokenizer of a client's text: the ids of the checkpoint's, and never a control token."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, models

from services.tokenizer.text.plain_tokenizer import plain_tokenizer
from tests.unit.tokenizer.checkpoints import byte_fallback, byte_level

_CONTROL = frozenset({"<s>", "</s>"})
_TEXTS = st.text(alphabet="abdef é😀\n", max_size=12)
_KINDS = (byte_fallback(), byte_level())


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    return plain_tokenizer(tokenizer, json.loads(tokenizer.to_str()), _CONTROL)


@pytest.mark.parametrize("tokenizer", _KINDS, ids=["byte fallback", "byte level"])
@given(data=st.data())
def test_text_without_control_tokens_has_the_ids_of_the_checkpoint(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    text = data.draw(_TEXTS)
    expected = tokenizer.encode(text, add_special_tokens=False).ids
    assert _plain(tokenizer).encode(text).ids == expected


@pytest.mark.parametrize("tokenizer", _KINDS, ids=["byte fallback", "byte level"])
@given(data=st.data())
def test_control_tokens_in_text_are_characters(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """A client could end the turn of another, or begin one of the system."""
    text = data.draw(_TEXTS) + data.draw(st.sampled_from(sorted(_CONTROL))) + data.draw(_TEXTS)
    assert not _CONTROL & set(_plain(tokenizer).encode(text).tokens)


@pytest.mark.parametrize("ignores_merges", [False, True])
@pytest.mark.parametrize("control", ["<s>", "☺"])
def test_control_token_of_the_vocabulary_is_not_found_as_a_word(
    control: str, ignores_merges: bool
) -> None:
    """Llama 3 looks for whole words before it merges, and a character needs no merge."""
    vocabulary = {token: index for index, token in enumerate(["<", "s", ">", "a", control])}
    model = models.BPE(vocabulary, [], ignore_merges=ignores_merges)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(control, special=True, normalized=False)])
    plain = plain_tokenizer(tokenizer, json.loads(tokenizer.to_str()), frozenset({control}))
    assert tokenizer.encode(control).tokens == [control]
    assert control not in plain.encode(f"{control}a{control}").tokens
    assert plain.encode(control).tokens == (["<", "s", ">"] if control == "<s>" else [])


def test_kept_token_has_its_id_although_the_model_does_not_know_it() -> None:
    """Without the control tokens before it, the tokenizers package would number it anew."""
    tokenizer = byte_level(plain=("<h1>",))
    assert _plain(tokenizer).encode("<h1>").ids == [tokenizer.token_to_id("<h1>")]
