"""Compiled grammars by id."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher

from services.grammar.matching.steering import Steering

__all__ = ["CompiledGrammar", "GrammarCache"]

_KEEP = 600.0  # seconds after the last use


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar, ready to be matched."""

    grammar_id: str
    prototype: LLMatcher  # copied for each sequence, never fed
    size: int  # bytes of memory, about
    steering: Steering | None = None  # where a sequence begins; None where nothing may repeat


class GrammarCache:
    """Holds grammars for 10 minutes after their last use: at most `entries` of them, and `size`
    bytes, or one that is larger.

    Over that the least recently used goes first, so that a flood of grammars can't fill it. What
    goes harms no matcher: each has a copy, and whoever finds a grammar gone compiles it again.
    """

    def __init__(self, entries: int, size: int, now: Callable[[], float] = time.monotonic) -> None:
        self._entries = entries
        self._most_bytes = size
        self._bytes = 0
        self._now = now
        self._held: OrderedDict[str, tuple[CompiledGrammar, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, grammar_id: str) -> CompiledGrammar | None:
        """The grammar, which counts as a use; None when it is not held."""
        self._drop_expired()
        held = self._held.get(grammar_id)
        if held is None:
            return None
        self.put(held[0])
        return held[0]

    def put(self, grammar: CompiledGrammar) -> None:
        """Hold a grammar."""
        self._drop(grammar.grammar_id)
        self._held[grammar.grammar_id] = (grammar, self._now())
        self._bytes += grammar.size
        while len(self._held) > self._entries or (
            self._bytes > self._most_bytes and len(self._held) > 1
        ):
            self._drop(next(iter(self._held)))
        self._drop_expired()

    def _drop(self, grammar_id: str) -> None:
        if grammar_id in self._held:
            self._bytes -= self._held.pop(grammar_id)[0].size

    def _drop_expired(self) -> None:
        oldest = self._now() - _KEEP
        while self._held:
            grammar, used = next(iter(self._held.values()))
            if used >= oldest:
                return
            self._drop(grammar.grammar_id)
