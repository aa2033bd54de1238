"""Queue of waiting sequences, and the order in which prompts are computed.

The order is: priority, then the service of the tenant, then short prompts before long ones. No
sequence starves: its priority rises while it waits, and later arrivals pass a long prompt only for
as long as the prompt itself takes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.engine.scheduling.sequence import TokenSequence

__all__ = ["PrefillCandidates", "PromptOrder", "WaitingQueue"]

_SECONDS_PER_PRIORITY = 10.0
"""Seconds of waiting that raise a sequence's priority by one"""


@dataclass(frozen=True, slots=True)
class PromptOrder:
    """The order of sequences at one moment."""

    now: float
    """Seconds, on the clock of arrivals"""
    highest: int
    """Highest priority of all prompts, which limits raised priorities. So waiting gives no
    advantage among equal priorities, and tenants share evenly"""

    def key(self, sequence: TokenSequence) -> tuple[float, ...]:
        """Return a sort key. The sequence with the least key is next."""
        command = sequence.request.command
        raised = int(max(self.now - command.arrival, 0.0) / _SECONDS_PER_PRIORITY)
        level = min(command.priority + raised, self.highest)
        return (-level, sequence.tenant.served, *_queue_key(sequence))


class WaitingQueue:
    """Waiting sequences in a sorted list for each tenant and priority.

    The order of the lists changes with each step, and the order within a list does not.
    """

    def __init__(self) -> None:
        self._queues: dict[tuple[bytes, int], list[TokenSequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[TokenSequence]:
        """Yield all sequences, in no particular order."""
        return (sequence for queue in self._queues.values() for sequence in queue)

    @property
    def highest(self) -> int | None:
        """Highest priority of a waiting sequence."""
        return max((priority for _, priority in self._queues), default=None)

    def add(self, sequence: TokenSequence) -> None:
        insort(self._queues.setdefault(_queue_of(sequence), []), sequence, key=_queue_key)
        self._count += 1

    def remove(self, sequence: TokenSequence) -> None:
        name = _queue_of(sequence)
        queue = self._queues[name]
        del queue[bisect_left(queue, _queue_key(sequence), key=_queue_key)]
        self._count -= 1
        if not queue:
            del self._queues[name]

    def in_order(self, order: PromptOrder) -> Iterator[TokenSequence]:
        """Yield the sequences that are not paused, the next one first.

        The caller may remove a sequence, and charge its tenant, before it takes the next one.
        """
        places = dict.fromkeys(self._queues, 0)
        while places:
            heads = {}
            for name, place in list(places.items()):
                queue = self._queues.get(name, [])
                while place < len(queue) and queue[place].is_paused:
                    place += 1
                if place == len(queue):
                    del places[name]
                else:
                    places[name] = place
                    heads[name] = queue[place]
            if not heads:
                return
            name = min(heads, key=lambda each: order.key(heads[each]))
            yield heads[name]
            queue = self._queues.get(name, [])
            if places[name] < len(queue) and queue[places[name]] is heads[name]:
                places[name] += 1


class PrefillCandidates:
    """Partly computed prompts and waiting sequences, merged in order."""

    def __init__(
        self, started: Iterable[TokenSequence], waiting: WaitingQueue, order: PromptOrder
    ) -> None:
        self._order = order
        self._started = sorted(started, key=order.key, reverse=True)
        self._waiting = waiting.in_order(order)
        self._next_waiting = next(self._waiting, None)

    def __iter__(self) -> Iterator[TokenSequence]:
        while self._started or self._next_waiting is not None:
            waiting = self._next_waiting
            if waiting is None or self._started_precedes(waiting):
                yield self._started.pop()
            else:
                yield waiting
                if self._next_waiting is not None:
                    self._next_waiting = next(self._waiting, None)

    def skip_waiting(self) -> None:
        """Leave out waiting sequences from now on."""
        self._next_waiting = None

    def _started_precedes(self, waiting: TokenSequence) -> bool:
        if not self._started:
            return False
        return self._order.key(self._started[-1]) <= self._order.key(waiting)


def _queue_of(sequence: TokenSequence) -> tuple[bytes, int]:
    return sequence.tenant.name, sequence.request.command.priority


def _queue_key(sequence: TokenSequence) -> tuple[float, int, int]:
    return sequence.queued.due, sequence.request.command.handle, sequence.index
