"""Per-token columns of a choice, between the engine's output and the client's."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.tokenizer.text.detokenizer import Detokenizer
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["Columns", "Score", "read_scores", "write_scores"]

_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class Score:
    """Logprob, rank and candidates of one token: one row of the engine's columns."""

    logprob: float
    rank: int
    top_ids: Sequence[int]
    top_logprobs: Sequence[float]

    def candidate_texts(self, detokenizer: Detokenizer) -> list[str]:
        """Return the text that each candidate would add. `detokenizer` has not read the token."""
        return [detokenizer.peek(candidate) for candidate in self.top_ids]

    def first(self, width: int) -> "Score":
        """Return the score with at most `width` candidates."""
        if len(self.top_ids) <= width:
            return self
        return Score(self.logprob, self.rank, self.top_ids[:width], self.top_logprobs[:width])

    @classmethod
    def none(cls, width: int) -> "Score":
        """Return the row of a token without a score, such as the first token of a prompt."""
        return cls(_NAN, 0, [0] * width, [_NAN] * width)


def read_scores(tokens: types_pb2.TokenColumns) -> list[Score]:
    """Return the rows of scored columns."""
    width = tokens.top_width
    top_ids, top_logprobs = list(tokens.top_ids), list(tokens.top_logprobs)
    ranks = tokens.ranks or [0] * len(tokens.ids)
    return [
        Score(
            logprob,
            rank,
            top_ids[place * width : (place + 1) * width],
            top_logprobs[place * width : (place + 1) * width],
        )
        for place, (logprob, rank) in enumerate(zip(tokens.logprobs, ranks, strict=True))
    ]


def write_scores(scores: Sequence[Score], tokens: types_pb2.TokenColumns) -> None:
    """Append scores to scored columns. All of them have the same number of candidates."""
    tokens.logprobs.extend([score.logprob for score in scores])
    tokens.ranks.extend([score.rank for score in scores])
    for score in scores:
        tokens.top_width = len(score.top_ids)
        tokens.top_ids.extend(score.top_ids)
        tokens.top_logprobs.extend(score.top_logprobs)


class Columns:
    """Columns of tokens that are ready to be sent. Only `ids` is filled if none is scored."""

    __slots__ = ("_top_texts", "ids", "offsets", "scores", "texts")

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.texts: list[str] = []
        self.offsets: list[int] = []
        """Code points from the start of the text to each token"""
        self.scores: list[Score] = []
        self._top_texts: list[str] = []

    def append(
        self, token: int, text: str, offset: int, score: Score, candidate_texts: Sequence[str]
    ) -> None:
        """Add a scored token. If it is one of its own candidates, it has `text` there, too."""
        self.ids.append(token)
        self.texts.append(text)
        self.offsets.append(offset)
        self.scores.append(score)
        self._top_texts.extend(
            text if candidate == token else candidate_text
            for candidate, candidate_text in zip(score.top_ids, candidate_texts, strict=True)
        )

    def write(self, delta: completion_pb2.ChoiceDelta) -> None:
        """Put the columns into a delta."""
        delta.token_ids.extend(self.ids)
        if not self.scores:
            return
        delta.tokens.ids.extend(self.ids)
        write_scores(self.scores, delta.tokens)
        delta.token_texts.extend(self.texts)
        delta.text_offsets.extend(self.offsets)
        delta.top_texts.extend(self._top_texts)
