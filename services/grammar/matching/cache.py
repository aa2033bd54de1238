"""A cache of compiled grammars."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from llguidance import LLMatcher

from services.common.sharing.tenant_cache import TenantCache
from services.grammar.matching.initial_state import OutputState

__all__ = ["CompiledGrammar", "GrammarCache"]

_LIFETIME = 600.0  # seconds after the last use


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A grammar with the initial states of its matchers."""

    grammar_id: str
    prototype: LLMatcher
    """Matcher that is copied for each sequence, and accepts no token itself."""
    size: int
    """Approximate memory, in bytes"""
    json: OutputState | None = None
    """State before the first token; None = the grammar alone is enough"""


@dataclass(slots=True)
class _CacheEntry:
    """A cached grammar and the time of its last use."""

    grammar: CompiledGrammar
    time: float


class GrammarCache:
    """Grammars by id, for 10 minutes after their last use.

    At most `entries` grammars and `size` bytes are cached, or one larger grammar. Beyond that, the
    tenant that holds most loses its least recently used one. Eviction harms no matcher, because
    each has a copy of its grammar. Engines compile an evicted grammar again.
    """

    def __init__(self, entries: int, size: int, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._held: TenantCache[str, _CacheEntry] = TenantCache(size, entries)

    def get(self, grammar_id: str) -> CompiledGrammar | None:
        """Return a grammar and count this as a use; None if it is not cached."""
        self._drop_expired()
        entry = self._held.get(grammar_id)
        if entry is None:
            return None
        entry.time = self._now()
        return entry.grammar

    def put(self, grammar: CompiledGrammar, tenant: str = "") -> None:
        """Add or replace a tenant's grammar."""
        self._drop_expired()
        entry = _CacheEntry(grammar, self._now())
        self._held.put(tenant, grammar.grammar_id, entry, grammar.size)

    def _drop_expired(self) -> None:
        oldest = self._now() - _LIFETIME
        while (found := self._held.oldest) is not None:
            grammar_id, entry = found
            if entry.time >= oldest:
                return
            self._held.drop(grammar_id)
