"""Sets of arrays that their items and lengths describe."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.grammar.schemas.conjunction import ALWAYS, NEVER, Conjunction, both

__all__ = ["EVERY_ARRAY", "ArraySet", "Contained"]

_FIRST = 8  # items among which those must be that an array has to contain
_MOST_CHOICES = 128


@dataclass(frozen=True, slots=True)
class Contained:
    """How many items from `start` on hold. `most` None: any number."""

    item: Conjunction
    fails: tuple[Conjunction, ...]
    """The cases in which an item does not hold"""
    start: int = 0
    fewest: int = 1
    most: int | None = None


@dataclass(frozen=True, slots=True)
class ArraySet:
    """The arrays that meet all that is said here."""

    prefix: tuple[Conjunction, ...] = ()
    rest: Conjunction = ALWAYS
    low: int = 0
    high: int | None = None
    contained: frozenset[Contained] = frozenset()
    unique: bool = False
    repeats: bool = False

    def intersection(self, other: "ArraySet") -> "ArraySet | None":
        """None where nothing is in both, as far as that can be told."""
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
        return merged.settled()

    def settled(self) -> "ArraySet | None":
        """The same, in a shorter form."""
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
        """What an item must be."""
        return self.prefix[index] if index < len(self.prefix) else self.rest

    def needed(self) -> Iterator[Conjunction]:
        """What must be possible for there to be any."""
        yield from (self.item(index) for index in range(min(self.low, len(self.prefix) + 1)))

    def obstacle(self) -> str | None:
        """The keyword that no grammar can hold here."""
        return '"not" over "uniqueItems"' if self.repeats else None

    def choices(self) -> Iterator["ArraySet"]:
        """The same without `contained`; beyond the first items some are left out."""
        if not self.contained:
            yield self
            return
        contained = min(self.contained, key=repr)
        others = replace(self, contained=self.contained - {contained})
        for choice in itertools.islice(others._placed(contained), _MOST_CHOICES):
            yield from choice.choices()

    def _placed(self, contained: Contained) -> Iterator["ArraySet"]:
        end = contained.start + _FIRST
        if self.high is not None:
            end = min(end, self.high)
        end = max(end, contained.start + contained.fewest)
        most = contained.most if contained.most is not None else contained.fewest
        for count in range(contained.fewest, most + 1):
            for places in itertools.combinations(range(contained.start, end), count):
                if contained.most is None:
                    yield from self._with(places, contained, contained.start + _FIRST, None)
                else:
                    for fails in contained.fails:
                        yield from self._with(places, contained, end, fails)

    def _with(
        self, places: tuple[int, ...], contained: Contained, end: int, fails: Conjunction | None
    ) -> Iterator["ArraySet"]:
        """With items at places that hold and, if any is given, others that fail."""
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
        placed = replace(self, prefix=tuple(prefix), rest=rest, low=low).settled()
        if placed is not None:
            yield placed


EVERY_ARRAY = ArraySet()
