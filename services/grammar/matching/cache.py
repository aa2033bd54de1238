"""A cache of compiled grammars."""

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher

from services.grammar.matching.uniqueness import UniquenessState

__all__ = ["CompiledGrammar", "GrammarCache"]

_LIFETIME = 600.0  # seconds after the last use


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar with the initial states of its matchers."""

    grammar_id: str
    prototype: LLMatcher
    """Copied for each sequence; never accepts a token itself."""
    size: int
    """Approximate memory, in bytes"""
    uniqueness: UniquenessState | None = None
    """None: the grammar allows no repeated keys or items"""


class GrammarCache:
    """Grammars by id, for 10 minutes after their last use.

    At most `entries` grammars and `size` bytes are cached, or one larger grammar. Beyond that, the
    least recently used is evicted. Eviction harms no matcher, because each has a copy of its
    grammar. Engines compile an evicted grammar again.
    """

    def __init__(self, entries: int, size: int, now: Callable[[], float] = time.monotonic) -> None:
        self._entries = entries
        self._most_bytes = size
        self._bytes = 0
        self._now = now
        self._held: OrderedDict[str, tuple[CompiledGrammar, float]] = OrderedDict()

    def get(self, grammar_id: str) -> CompiledGrammar | None:
        """Return a grammar and count this as a use; None if it is not cached."""
        self._drop_expired()
        entry = self._held.get(grammar_id)
        if entry is None:
            return None
        self.put(entry[0])
        return entry[0]

    def put(self, grammar: CompiledGrammar) -> None:
        """Add or replace a grammar."""
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
        oldest = self._now() - _LIFETIME
        while self._held:
            grammar, used = next(iter(self._held.values()))
            if used >= oldest:
                return
            self._drop(grammar.grammar_id)
