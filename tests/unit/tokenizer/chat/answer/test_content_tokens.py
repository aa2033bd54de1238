"""Logprobs of a message are those of its content, with the bytes that its tokens really have."""

from collections.abc import Sequence

import pytest

from services.tokenizer.chat.answer.content_tokens import ContentTokens, TokenBytes
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types

# é is 6 and 7; 😀 is 8, 9, 10 and 11; 12 is left out of the text
_PIECES = [
    b"a", b" b", b"<t>", b"cd", b"", b"\n", b"\xc3", b"\xa9x", b"\xf0", b"\x9f", b"\x98", b"\x80",
    b"<s>",
]  # fmt: skip

_HIDDEN = {12}


def _delta(*tokens: tuple[int, str]) -> completion.ChoiceDelta:
    columns = types.TokenColumns(
        ids=[token for token, _ in tokens],
        logprobs=[-float(place) for place in range(len(tokens))],
        ranks=[1] * len(tokens),
        top_width=2,
        top_ids=[other for token, _ in tokens for other in (token, 6)],
        top_logprobs=[-0.5] * (2 * len(tokens)),
    )
    shown = ["" if token in _HIDDEN else text for token, text in tokens]
    return completion.ChoiceDelta(
        text="".join(shown),
        tokens=columns,
        token_texts=[text for _, text in tokens],
        text_offsets=[7 + len("".join(shown[:place])) for place in range(len(shown))],
    )


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
def test_bytes_are_those_that_each_token_adds(
    tokens: Sequence[tuple[int, str]], expected: list[bytes]
) -> None:
    table = TokenBytes(_PIECES, _HIDDEN)
    assert [table.of(token, text) for token, text in tokens] == expected


def test_tokens_wait_until_it_is_settled_what_they_are() -> None:
    tokens = ContentTokens(_PIECES, _HIDDEN)
    tokens.extend(_delta((0, "a"), (5, "\n"), (2, "<t>"), (6, ""), (7, "éx"), (4, "")))
    answer = completion.ChatDelta()
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
    """Else an EOS that was to be ignored looks like any token without text."""
    tokens = ContentTokens(_PIECES, _HIDDEN)
    tokens.extend(_delta((0, "a"), (12, "<s>"), (3, "cd"), (12, "<s>")))
    tokens.settle(3, is_content=True)
    answer = completion.ChatDelta()
    tokens.write(answer)
    assert list(answer.token_bytes) == [b"a", b"<s>", b"cd"]
    assert list(answer.top_bytes) == [b"a", b"\xc3", b"<s>", b"\xc3", b"cd", b"\xc3"]


def test_a_token_on_the_border_is_contents() -> None:
    """Its bytes would be missing otherwise."""
    tokens = ContentTokens(_PIECES, _HIDDEN)
    tokens.extend(_delta((3, "cd")))
    tokens.settle(1, is_content=True)
    tokens.settle(1, is_content=False)
    answer = completion.ChatDelta()
    tokens.write(answer)
    assert list(answer.token_bytes) == [b"cd"]
