"""The tokens of a message's content, with their scores and true bytes."""

import codecs
from collections import deque
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.tokenizer.completion.columns import Score, read_scores
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["ContentTokens", "TokenBytes"]


class TokenBytes:
    """The bytes that each token of one text adds, those of unfinished characters too. Special
    tokens that the text leaves out have the bytes of their own text."""

    def __init__(self, pieces: Sequence[bytes], hidden: Container[int]) -> None:
        """`pieces` are those of the vocabulary, by id; `hidden` is what the text leaves out."""
        self._pieces = pieces
        self._hidden = hidden
        self._pending = b""  # of a character

    def of(self, token: int, text: str) -> bytes:
        """The bytes of the next token, which added `text`: fewer than it spells where a stop string
        cut it, or a space at the very start of the text was left out."""
        if token in self._hidden:
            return self._pieces[token]
        piece, before = self._pieces[token], len(self._pending)
        spelled = self._pending + piece
        whole, used = codecs.utf_8_decode(spelled, "replace", False)
        self._pending = spelled[used:]
        if text == whole or not whole:
            return piece
        if whole.startswith(text):
            return piece[: max(0, len(text.encode()) - before)]
        return piece[len(piece) - len(text.encode()) :] if whole.endswith(text) else piece

    def candidates(self, ids: Sequence[int]) -> list[bytes]:
        """What these would add."""
        return [self._pieces[token] for token in ids]


@dataclass(frozen=True, slots=True)
class _Token:
    token: int
    start: int  # both in code points of the generated text
    end: int
    data: bytes
    score: Score
    candidates: list[bytes]


class ContentTokens:
    """Holds tokens until it is settled whether they are content. Places are in code points of the
    generated text."""

    def __init__(self, pieces: Sequence[bytes], hidden: Container[int]) -> None:
        """As `TokenBytes`."""
        self._bytes = TokenBytes(pieces, hidden)
        self._held: deque[_Token] = deque()
        self._received = 0
        self._settled = 0
        self._content: deque[tuple[int, int]] = deque()  # settled spans that tokens still ask for

    def extend(self, delta: completion_pb2.ChoiceDelta) -> None:
        """Further tokens, scored."""
        scores = read_scores(delta.tokens)
        # offsets tell what each token adds: the texts of those that add nothing are shown, too
        begin = delta.text_offsets[0] if delta.text_offsets else 0
        places = [*(offset - begin for offset in delta.text_offsets), len(delta.text)]
        for token, span, score in zip(delta.tokens.ids, pairwise(places), scores, strict=True):
            text = delta.text[slice(*span)]
            start, self._received = self._received, self._received + len(text)
            data = self._bytes.of(token, text)
            candidates = self._bytes.candidates(score.top_ids)
            if token in score.top_ids:
                candidates[list(score.top_ids).index(token)] = data
            self._held.append(_Token(token, start, self._received, data, score, candidates))

    def settle(self, length: int, *, is_content: bool) -> None:
        """The next so many code points are content, or are not."""
        begin, self._settled = self._settled, self._settled + length
        if is_content and length:
            self._content.append((begin, self._settled))

    def write(self, delta: completion_pb2.ChatDelta) -> None:
        """Put those that are content for certain into a delta. Tokens without text go with the one
        that finishes their character."""
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


def _write(token: _Token, delta: completion_pb2.ChatDelta) -> None:
    columns = delta.tokens
    columns.ids.append(token.token)
    columns.logprobs.append(token.score.logprob)
    columns.ranks.append(token.score.rank)
    columns.top_width = len(token.score.top_ids)
    columns.top_ids.extend(token.score.top_ids)
    columns.top_logprobs.extend(token.score.top_logprobs)
    delta.token_bytes.append(token.data)
    delta.top_bytes.extend(token.candidates)
