"""Logprobs of a message: those of its content, with the true bytes of its tokens."""

from collections.abc import Sequence

import pytest

from services.tokenizer.chat.answer.content_tokens import ContentTokens, TokenBytes
from services.tokenizer.completion.columns import Columns, Score
from tokenwire.pb.completion.v1 import completion_pb2 as completion

# é is 6 and 7; 😀 is 8, 9, 10 and 11; 12 is left out of the text
_PIECES = [
    b"a", b" b", b"<t>", b"cd", b"", b"\n", b"\xc3", b"\xa9x", b"\xf0", b"\x9f", b"\x98", b"\x80",
    b"<s>",
]  # fmt: skip

_HIDDEN = {12}


def _scored(*tokens: tuple[int, str]) -> tuple[str, Columns]:
    """Return the text of tokens, and their columns; the second candidate of each is 6."""
    columns, text = Columns(), ""
    for place, (token, shown) in enumerate(tokens):
        score = Score(-float(place), 1, [token, 6], [-0.5, -0.5])
        columns.append(token, shown, 7 + len(text), score, ["", ""])
        text += "" if token in _HIDDEN else shown
    return text, columns


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([(0, "a"), (1, " b")], [b"a", b" b"]),
        ([(6, ""), (7, "éx")], [b"\xc3", b"\xa9x"]),
        ([(8, ""), (9, ""), (10, ""), (11, "😀")], [b"\xf0", b"\x9f", b"\x98", b"\x80"]),
        ([(6, ""), (7, "é")], [b"\xc3", b"\xa9"]),  # a stop string took the x
        ([(3, "c")], [b"c"]),
        ([(3, "")], [b""]),
        ([(1, "b")], [b"b"]),  # the first space of a text, which the decoder left out
        ([(6, ""), (0, "\ufffda")], [b"\xc3", b"a"]),
        ([(0, "a"), (6, "\ufffd")], [b"a", b"\xc3"]),  # unfinished at the end
        ([(0, "a"), (4, "")], [b"a", b""]),
        ([(6, ""), (12, ""), (7, "éx")], [b"\xc3", b"<s>", b"\xa9x"]),
    ],
)
def test_each_token_has_the_bytes_that_it_adds(
    tokens: Sequence[tuple[int, str]], expected: list[bytes]
) -> None:
    table = TokenBytes(_PIECES, _HIDDEN)
    assert [table.of(token, text) for token, text in tokens] == expected


def test_tokens_wait_until_their_text_is_settled() -> None:
    tokens = ContentTokens(_PIECES, _HIDDEN)
    tokens.extend(*_scored((0, "a"), (5, "\n"), (2, "<t>"), (6, ""), (7, "éx"), (4, "")))
    answer = completion.ChoiceDelta()
    tokens.write(answer)
    assert not answer.tokens.ids
    tokens.settle(1, is_content=True)
    tokens.write(answer)
    assert list(answer.tokens.ids) == [0]
    tokens.settle(4, is_content=False)
    tokens.settle(2, is_content=True)
    tokens.write(answer)
    assert list(answer.tokens.ids) == [0, 6, 7]
    assert list(answer.token_bytes) == [b"a", b"\xc3", b"\xa9x"]
    assert list(answer.top_bytes) == [b"a", b"\xc3", b"\xc3", b"\xc3", b"\xa9x", b"\xc3"]
    assert list(answer.tokens.logprobs) == [0, -3, -4]


def test_special_tokens_within_the_content_have_their_own_bytes() -> None:
    """An ignored EOS would look like any token without text."""
    tokens = ContentTokens(_PIECES, _HIDDEN)
    tokens.extend(*_scored((0, "a"), (12, "<s>"), (3, "cd"), (12, "<s>")))
    tokens.settle(3, is_content=True)
    answer = completion.ChoiceDelta()
    tokens.write(answer)
    assert list(answer.token_bytes) == [b"a", b"<s>", b"cd"]
    assert list(answer.top_bytes) == [b"a", b"\xc3", b"<s>", b"\xc3", b"cd", b"\xc3"]


def test_token_across_the_border_of_the_content_is_kept() -> None:
    """Its bytes would be missing from the content."""
    tokens = ContentTokens(_PIECES, _HIDDEN)
    tokens.extend(*_scored((3, "cd")))
    tokens.settle(1, is_content=True)
    tokens.settle(1, is_content=False)
    answer = completion.ChoiceDelta()
    tokens.write(answer)
    assert list(answer.token_bytes) == [b"cd"]
