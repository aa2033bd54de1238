"""Scores of prompts on their way to the client, apart from any echo."""

from collections import deque
from collections.abc import Iterator, Sequence

from services.tokenizer.completion.columns import Score
from services.tokenizer.text.detokenizer import TokenTable
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["PromptLogprobs"]


class PromptLogprobs:
    """Gathers runs of scored prompt tokens until they are taken, in the order they came."""

    def __init__(self, table: TokenTable, width: int) -> None:
        """table: what every token is on its own; width: candidates that are told of each."""
        self._table = table
        self._width = width
        self._runs: deque[completion_pb2.PromptLogprobs] = deque()

    def add(self, prompt: int, position: int, ids: Sequence[int], scores: Sequence[Score]) -> None:
        """A run of tokens of a prompt. `position` is that of the first, from the prompt's start."""
        run = completion_pb2.PromptLogprobs(prompt=prompt, position=position)
        columns = run.tokens
        columns.ids.extend(ids)
        columns.logprobs.extend([score.logprob for score in scores])
        columns.ranks.extend([score.rank for score in scores])
        for score in scores:
            top = score.first(self._width)
            columns.top_width = len(top.top_ids)
            columns.top_ids.extend(top.top_ids)
            columns.top_logprobs.extend(top.top_logprobs)
        run.token_texts.extend(map(self._text, columns.ids))
        run.top_texts.extend(map(self._text, columns.top_ids))
        self._runs.append(run)

    def take(self) -> Iterator[completion_pb2.PromptLogprobs]:
        """The runs that have come. Those that the caller leaves are given next time."""
        while self._runs:
            yield self._runs.popleft()

    def _text(self, token: int) -> str:
        text = self._table.texts[token]
        return self._table.pieces[token].decode(errors="replace") if text is None else text
