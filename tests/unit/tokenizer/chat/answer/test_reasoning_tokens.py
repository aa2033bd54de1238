"""Tokens of reasoning: their number is that of the tokens whose text it is."""

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.tokenizer.chat.answer.reasoning_tokens import ReasoningTokens

# é is 5 and 6; 😀 is 7, 8, 9 and 10; 11 is left out of the text
PIECES = [
    b"a", b" b", b"<t>", b"</t>", b"cd", b"\xc3", b"\xa9", b"\xf0", b"\x9f", b"\x98", b"\x80", b"",
]  # fmt: skip
WHOLE = st.sampled_from([[0], [1], [4], [5, 6], [7, 8, 9, 10]])
WORDS = st.lists(WHOLE, max_size=8).map(lambda words: [token for word in words for token in word])


def text_of(tokens: list[int]) -> str:
    return b"".join(PIECES[token] for token in tokens).decode()


@given(WORDS, WORDS, st.lists(st.integers(0, 60), max_size=6))
def test_count_does_not_depend_on_the_pieces_that_arrive(
    reasoning: list[int], content: list[int], cuts: list[int]
) -> None:
    tokens = [2, *reasoning, 3, *content]
    kinds = [False] * 3 + [True] * len(text_of(reasoning)) + [False] * len(text_of([3, *content]))
    counter, decoder = ReasoningTokens(PIECES), codecs.getincrementaldecoder("utf-8")()
    places = sorted({0, len(tokens), *(cut for cut in cuts if cut < len(tokens))})
    for begin, end in pairwise(places):
        ids = tokens[begin:end]
        text = "".join(decoder.decode(PIECES[token]) for token in ids)
        counter.extend(text, ids)
        for _ in text:  # the parser decides at once
            counter.settle(1, is_reasoning=kinds.pop(0))
    assert counter.count == len(reasoning)


def test_tokens_wait_until_their_text_is_decided() -> None:
    counter = ReasoningTokens(PIECES)
    counter.extend("acd", [0, 11, 4])
    assert counter.count == 0
    counter.settle(2, is_reasoning=True)
    assert counter.count == 1
    counter.settle(1, is_reasoning=True)
    assert counter.count == 3


@pytest.mark.parametrize(("text", "ids"), [("b", [1]), ("", [0]), ("ab", [0, 4])])
def test_text_that_differs_from_the_pieces_is_no_error(text: str, ids: list[int]) -> None:
    """A stop string cuts tokens, and decoders leave out the first space."""
    counter = ReasoningTokens(PIECES)
    counter.extend(text, ids)
    counter.settle(len(text), is_reasoning=True)
    assert counter.count == (len(ids) if text else 0)
