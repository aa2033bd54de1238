"""Compiled grammars by id."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher

__all__ = ["CompiledGrammar", "GrammarCache"]

_KEEP = 600.0  # seconds after the last use


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar, ready to be matched."""

    grammar_id: str
    prototype: LLMatcher  # copied for each sequence, never fed
    size: int  # bytes, about


class GrammarCache:
    """Holds grammars for 10 minutes after their last use, and at most `entries` of them.

    Over that number the least recently used goes first, so that a flood of grammars can't fill it.
    """

    def __init__(self, entries: int, now: Callable[[], float] = time.monotonic) -> None:
        self._entries = entries
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
        self._held[grammar.grammar_id] = (grammar, self._now())
        self._held.move_to_end(grammar.grammar_id)
        while len(self._held) > self._entries:
            self._held.popitem(last=False)
        self._drop_expired()

    def _drop_expired(self) -> None:
        oldest = self._now() - _KEEP
        while self._held:
            grammar, used = next(iter(self._held.values()))
            if used >= oldest:
                return
            del self._held[grammar.grammar_id]
