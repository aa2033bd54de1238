"""Preemption policy: the sequences that give up blocks and places, and their order."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.step_plan import SchedulerLimits

__all__ = ["Preemption"]

K = TypeVar("K", bound=Hashable)

_PAUSE_SECONDS = 1.0
"""Seconds without credit after which a sequence may be preempted; less may be a round trip"""
_GUARANTEED_SHARE = 8
"""Number of places of which a waiting tenant gets one, even if another tenant holds all"""


class Preemption:
    """Choice of victims among the running sequences."""

    def __init__(
        self, running: Sequence[TokenSequence], caches: CachePools, limits: SchedulerLimits
    ) -> None:
        """running: the scheduler's list of running sequences, in order of scheduling."""
        self._running = running
        self._caches = caches
        self._guaranteed = max(1, limits.max_running // _GUARANTEED_SHARE)

    def victim_for_growth(self) -> TokenSequence:
        """Return the sequence to preempt so that another can grow: a paused or the last one."""
        # paused sequences are in no plan, and the last one comes after those already planned
        paused = (s for s in reversed(self._running) if s.is_paused and s.uncomputed <= 1)
        return next(paused, self._running[-1])

    def victims_for(
        self, newcomer: TokenSequence, missing_blocks: list[int], missing_places: int, now: float
    ) -> list[TokenSequence]:
        """Return the victims whose blocks and places let a newcomer start.

        The list is empty if all candidates together are too few. missing_blocks: by pool, the
        blocks needed beyond the free ones.
        """
        victims: list[TokenSequence] = []
        for victim in self._candidates(newcomer, now):
            victims.append(victim)
            freed = self._caches.freed_by(victim)
            missing_blocks = [m - f for m, f in zip(missing_blocks, freed, strict=True)]
            missing_places -= 1
            if max(missing_blocks) <= 0 and missing_places <= 0:
                return victims
        return []

    def _candidates(self, newcomer: TokenSequence, now: float) -> Iterator[TokenSequence]:
        """Yield the sequences that should yield to a newcomer, the first victim first."""
        priority = newcomer.request.command.priority
        last_first = self._running[::-1]
        paused = [
            s
            for s in last_first
            if s.starved_since is not None
            and s.starved_since <= now - _PAUSE_SECONDS
            and s.uncomputed <= 1
        ]
        yield from paused
        others = [s for s in last_first if s not in paused]
        yield from (s for s in others if s.request.command.priority < priority)
        # only a sequence that has never run preempts its peers, or they would alternate
        if newcomer.cached_tokens is None:
            peers = [s for s in others if s.request.command.priority == priority]
            yield from self._greediest(newcomer, peers)

    def _greediest(
        self, newcomer: TokenSequence, peers: list[TokenSequence]
    ) -> Iterator[TokenSequence]:
        """Yield sequences of the tenants that hold most, then of the newcomer's own tenant.

        Within its own tenant, a request without a place takes places of the largest requests.
        """
        tenant = newcomer.tenant
        held = Counter(s.tenant.name for s in peers)
        if tenant.running < self._guaranteed:
            del held[tenant.name]
            yield from _from_largest(held, peers, tenant.running + 1, lambda s: s.tenant.name)
        if newcomer.request.running == 0:
            own = [s for s in peers if s.tenant is tenant]
            requests = Counter(id(s.request) for s in own)
            yield from _from_largest(requests, own, 1, lambda s: id(s.request))


def _from_largest(
    held: Counter[K],
    sequences: Sequence[TokenSequence],
    least: int,
    holder: Callable[[TokenSequence], K],
) -> Iterator[TokenSequence]:
    """Yield sequences of the holder with most, while it has more than `least`."""
    owned: dict[K, list[TokenSequence]] = {}
    for sequence in reversed(sequences):
        owned.setdefault(holder(sequence), []).append(sequence)
    while held:
        name, count = held.most_common(1)[0]
        if count <= least:
            return
        held[name] -= 1
        yield owned[name].pop()
