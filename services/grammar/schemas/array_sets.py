"""Sets of arrays: items, lengths, "contains" and uniqueness."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.grammar.schemas.conjunction import ALWAYS, NEVER, Conjunction, both

__all__ = ["EVERY_ARRAY", "ArraySet", "Contained"]

_WINDOW = 8  # items among which an array's contained items are placed
_MAX_ALTERNATIVES = 128


@dataclass(frozen=True, slots=True)
class Contained:
    """Bounds on the number of items, from index `start` on, that satisfy a conjunction."""

    item: Conjunction
    fails: tuple[Conjunction, ...]
    """Alternatives in which an item does not satisfy `item`"""
    start: int = 0
    fewest: int = 1
    most: int | None = None
    """Most items that satisfy `item`; None = unbounded"""


@dataclass(frozen=True, slots=True)
class ArraySet:
    """The arrays that satisfy all constraints."""

    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = ALWAYS
    low: int = 0
    high: int | None = None
    contained: frozenset[Contained] = frozenset()
    unique: bool = False
    repeats: bool = False
    """True if some items must be equal, which is the negation of `unique`"""

    def intersection(self, other: "ArraySet") -> "ArraySet | None":
        """Return the arrays in both sets, or None if they are known to be disjoint."""
        length = max(len(self.prefix), len(other.prefix))
        highs = [high for high in (self.high, other.high) if high is not None]
        merged = ArraySet(
            tuple(both(self.item(i), other.item(i)) for i in range(length)),
            both(self.rest, other.rest),
            max(self.low, other.low),
            min(highs, default=None),
            self.contained | other.contained,
            self.unique or other.unique,
            self.repeats or other.repeats,
        )
        return merged.normalized()

    def normalized(self) -> "ArraySet | None":
        """Return the set with the shortest prefix and tightest length, or None if it is empty."""
        limit = len(self.prefix) if self.rest == NEVER else None
        for index, item in enumerate(self.prefix):
            if item == NEVER:
                limit = index
                break
        high = self.high if limit is None else min(limit, limit if self.high is None else self.high)
        if (high is not None and self.low > high) or (self.unique and self.repeats):
            return None
        prefix = self.prefix if high is None else self.prefix[:high]
        while prefix and prefix[-1] == self.rest:
            prefix = prefix[:-1]
        return replace(self, prefix=prefix, high=high)

    def item(self, index: int) -> Conjunction:
        """Return the conjunction that an item must satisfy."""
        return self.prefix[index] if index < len(self.prefix) else self.rest

    def needed(self) -> Iterator[Conjunction]:
        """Yield the conjunctions that must be satisfiable for the set not to be empty."""
        yield from (self.item(index) for index in range(min(self.low, len(self.prefix) + 1)))

    def obstacle(self) -> str | None:
        """Return the keyword that no grammar can enforce, or None."""
        return '"not" over "uniqueItems"' if self.repeats else None

    def alternatives(self) -> Iterator["ArraySet"]:
        """Yield sets without `contained` whose union is the set, or a part of it.

        Contained items are placed among the first few; other placements are left out.
        """
        if not self.contained:
            yield self
            return
        contained = min(self.contained, key=repr)
        others = replace(self, contained=self.contained - {contained})
        for placed in itertools.islice(others._placed(contained), _MAX_ALTERNATIVES):
            yield from placed.alternatives()

    def _placed(self, contained: Contained) -> Iterator["ArraySet"]:
        end = contained.start + _WINDOW
        if self.high is not None:
            end = min(end, self.high)
        end = max(end, contained.start + contained.fewest)
        most = contained.most if contained.most is not None else contained.fewest
        for count in range(contained.fewest, most + 1):
            for places in itertools.combinations(range(contained.start, end), count):
                if contained.most is None:
                    yield from self._with(places, contained, contained.start + _WINDOW, None)
                else:
                    for fails in contained.fails:
                        yield from self._with(places, contained, end, fails)

    def _with(
        self, places: tuple[int, ...], contained: Contained, end: int, fails: Conjunction | None
    ) -> Iterator["ArraySet"]:
        """Require contained items at `places`, and `fails` of all others unless it is None."""
        length = max(len(self.prefix), places[-1] + 1 if places else 0)
        if fails is not None:
            length = max(length, end)
        prefix = [self.item(index) for index in range(length)]
        for index in range(contained.start, length):
            if index in places:
                prefix[index] = both(prefix[index], contained.item)
            elif fails is not None:
                prefix[index] = both(prefix[index], fails)
        low = max(self.low, places[-1] + 1 if places else 0)
        rest = self.rest if fails is None else both(self.rest, fails)
        placed = replace(self, prefix=tuple(prefix), rest=rest, low=low).normalized()
        if placed is not None:
            yield placed


EVERY_ARRAY = ArraySet()
