"""Received output of a request, in the numbers that resume the request elsewhere."""

from array import array
from collections import Counter, defaultdict

from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["ReceivedOutput"]


class ReceivedOutput:
    """Generated ids, ends and scores that arrived, whether or not they were sent on."""

    __slots__ = ("ended", "ids", "scored")

    def __init__(self) -> None:
        self.ids: defaultdict[int, array[int]] = defaultdict(lambda: array("I"))
        """Generated ids by choice; without any if only its echo arrived"""
        self.ended: dict[int, int] = {}
        """Tokens of the choices that ended, by choice"""
        self.scored: Counter[int] = Counter()
        """Scored tokens by prompt"""

    @property
    def progress(self) -> int:
        """Number of tokens, ends and scores. It only grows."""
        tokens = sum(map(len, self.ids.values()))
        return tokens + len(self.ended) + self.scored.total()

    def resumption(self) -> completion_pb2.Resumption:
        """Return what a request needs to continue behind this output."""
        resumption = completion_pb2.Resumption()
        for index, ids in self.ids.items():
            if index not in self.ended:
                resumption.choices.add(index=index, generated=types_pb2.TokenIds(ids=ids))
        for index, tokens in self.ended.items():
            resumption.choices.add(index=index, completion_tokens=tokens)
        prompts = max(self.scored, default=-1) + 1
        resumption.scored_prompt_tokens.extend(self.scored[index] for index in range(prompts))
        return resumption
