"""Tokens of a message's content, with their scores and bytes."""

import codecs
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.tokenizer.completion.columns import Columns, Score, write_scores
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["ContentTokens", "TokenBytes"]


class TokenBytes:
    """Bytes that each token of one text adds, even if they are a part of a character.

    A special token that the text leaves out has the bytes of its own text.
    """

    def __init__(self, pieces: Sequence[bytes], hidden: Container[int]) -> None:
        """pieces: bytes of all tokens by id. hidden: ids of tokens that the text leaves out."""
        self._pieces = pieces
        self._hidden = hidden
        self._pending = b""  # bytes of an unfinished character

    def of(self, token: int, text: str) -> bytes:
        """Return the bytes of the next token, which added `text`.

        They are fewer than the token's own if a stop string cut it, or if the decoder dropped a
        space at the start of the text.
        """
        if token in self._hidden:
            return self._pieces[token]
        piece, before = self._pieces[token], len(self._pending)
        spelled = self._pending + piece
        whole, consumed = codecs.utf_8_decode(spelled, "replace", False)
        self._pending = spelled[consumed:]
        if text == whole or not whole:
            return piece
        if whole.startswith(text):
            return piece[: max(0, len(text.encode()) - before)]
        return piece[len(piece) - len(text.encode()) :] if whole.endswith(text) else piece


@dataclass(frozen=True, slots=True)
class _Token:
    token: int
    start: int  # as `end`, in code points of the generated text
    end: int
    data: bytes
    score: Score
    candidates: list[bytes]


class ContentTokens:
    """Scored tokens that wait until the parser decides whether they are content.

    Places are in code points of the generated text.
    """

    def __init__(self, pieces: Sequence[bytes], hidden: Container[int]) -> None:
        """pieces, hidden: arguments of `TokenBytes`."""
        self._pieces = pieces
        self._bytes = TokenBytes(pieces, hidden)
        self._held: deque[_Token] = deque()
        self._received = 0
        self._settled = 0
        self._content: deque[tuple[int, int]] = deque()
        """Spans of content that held tokens may overlap"""

    def extend(self, text: str, columns: Columns) -> None:
        """Add scored tokens, which add `text`."""
        # `columns.texts` is not used, because it has texts of tokens that the text leaves out
        begin = columns.offsets[0] if columns.offsets else 0
        places = [*(offset - begin for offset in columns.offsets), len(text)]
        for token, span, score in zip(columns.ids, pairwise(places), columns.scores, strict=True):
            added = text[slice(*span)]
            start, self._received = self._received, self._received + len(added)
            data = self._bytes.of(token, added)
            candidates = [self._pieces[candidate] for candidate in score.top_ids]
            if token in score.top_ids:
                candidates[list(score.top_ids).index(token)] = data
            self._held.append(_Token(token, start, self._received, data, score, candidates))

    def settle(self, length: int, *, is_content: bool) -> None:
        """Record whether the next `length` code points are content."""
        begin, self._settled = self._settled, self._settled + length
        if is_content and length:
            self._content.append((begin, self._settled))

    def write(self, delta: completion_pb2.ChoiceDelta) -> None:
        """Put tokens of the content into a delta; a token without text goes with its character."""
        silent: list[_Token] = []
        while self._held and self._held[0].end <= self._settled:
            token = self._held.popleft()
            silent.append(token)
            if token.start == token.end:
                continue
            while self._content and self._content[0][1] <= token.start:
                self._content.popleft()
            if self._content and self._content[0][0] < token.end:
                for part in silent:
                    _write(part, delta)
            silent.clear()
        self._held.extendleft(reversed(silent))


def _write(token: _Token, delta: completion_pb2.ChoiceDelta) -> None:
    delta.tokens.ids.append(token.token)
    write_scores([token.score], delta.tokens)
    delta.token_bytes.append(token.data)
    delta.top_bytes.extend(token.candidates)
