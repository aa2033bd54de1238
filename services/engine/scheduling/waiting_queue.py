"""Waiting sequences, in the order in which they should start.

Higher priority first, then the tenant that was served least, then short prompts before long ones.
Nobody starves: a priority rises while its sequence waits, and a long prompt is passed only by what
arrives within the time that it takes itself.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from services.engine.scheduling.sequence import Sequence

__all__ = ["Turn", "Turns", "WaitingQueue"]

_SECONDS_PER_PRIORITY = 10.0
"""A sequence that has waited so long counts as one of the next higher priority"""


@dataclass(frozen=True, slots=True)
class Turn:
    """What the order of sequences depends on, beside the sequences."""

    now: float
    """Seconds, on the clock of arrivals"""
    highest: int
    """Highest priority of all sequences that want tokens. No other one rises above it: among equal
    priorities waiting gives nothing, and tenants share evenly"""

    def of(self, sequence: Sequence) -> tuple[int, float, float, int, int]:
        """Sorts sequences: the least is next."""
        command = sequence.request.command
        raised = int(max(self.now - command.arrival, 0.0) / _SECONDS_PER_PRIORITY)
        level = min(command.priority + raised, self.highest)
        return (-level, sequence.tenant.served, *_place(sequence))


class WaitingQueue:
    """A sorted list for each tenant and priority; who is next among them changes with each step."""

    def __init__(self) -> None:
        self._queues: dict[tuple[bytes, int], list[Sequence]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        """All of them, in no particular order."""
        return (sequence for queue in self._queues.values() for sequence in queue)

    @property
    def highest(self) -> int | None:
        """Highest priority."""
        return max((priority for _, priority in self._queues), default=None)

    def add(self, sequence: Sequence) -> None:
        """Put it in its place."""
        insort(self._queues.setdefault(_queue_of(sequence), []), sequence, key=_place)
        self._count += 1

    def remove(self, sequence: Sequence) -> None:
        """Take it out."""
        name = _queue_of(sequence)
        queue = self._queues[name]
        del queue[bisect_left(queue, _place(sequence), key=_place)]
        self._count -= 1
        if not queue:
            del self._queues[name]

    def in_turn(self, turn: Turn) -> Iterator[Sequence]:
        """The sequences that want to start, the next one first. Each may be removed, and its tenant
        served, before the one after it is asked for."""
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
            name = min(heads, key=lambda each: turn.of(heads[each]))
            yield heads[name]
            queue = self._queues.get(name, [])
            if places[name] < len(queue) and queue[places[name]] is heads[name]:
                places[name] += 1


class Turns:
    """Prompts that are under way and sequences that wait, the next one first."""

    def __init__(self, under_way: Iterable[Sequence], waiting: WaitingQueue, turn: Turn) -> None:
        self._turn = turn
        self._under_way = sorted(under_way, key=turn.of, reverse=True)
        self._waiting = waiting.in_turn(turn)
        self._next_waiting = next(self._waiting, None)

    def __iter__(self) -> Iterator[Sequence]:
        while self._under_way or self._next_waiting is not None:
            waiting = self._next_waiting
            if waiting is None or self._comes_before(waiting):
                yield self._under_way.pop()
            else:
                yield waiting
                if self._next_waiting is not None:
                    self._next_waiting = next(self._waiting, None)

    def end_starts(self) -> None:
        """Leave out those that wait from now on."""
        self._next_waiting = None

    def _comes_before(self, waiting: Sequence) -> bool:
        """Whether a prompt that is under way does."""
        if not self._under_way:
            return False
        return self._turn.of(self._under_way[-1]) <= self._turn.of(waiting)


def _queue_of(sequence: Sequence) -> tuple[bytes, int]:
    return sequence.tenant.name, sequence.request.command.priority


def _place(sequence: Sequence) -> tuple[float, int, int]:
    return sequence.due, sequence.request.command.handle, sequence.index
