"""Sets of objects that their members describe."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from services.grammar.schemas.conjunction import ALWAYS, NEVER, Conjunction, both
from services.grammar.schemas.string_sets import matches

__all__ = ["EVERY_OBJECT", "Exceptional", "ObjectSet"]

_MOST_CHOICES = 256
_FEW = 4  # names of which all combinations are tried


@dataclass(frozen=True, slots=True)
class Exceptional:
    """A member that there must be: any but those named or matched, with a value."""

    value: Conjunction
    but_names: frozenset[str] = frozenset()
    but_patterns: frozenset[str] = frozenset()
    only_pattern: str | None = None
    key: Conjunction = ALWAYS
    """What its name must be"""


@dataclass(frozen=True, slots=True)
class ObjectSet:
    """The objects that meet all that is said here."""

    named: tuple[tuple[str, Conjunction], ...] = ()
    """Values by name; these say all that is said of the names, patterns included"""
    patterns: tuple[tuple[str, Conjunction], ...] = ()
    """Values of other members, by what their names match; all that match hold"""
    rest: Conjunction = ALWAYS
    """Values of all others"""
    required: frozenset[str] = frozenset()
    low: int = 0
    high: int | None = None
    names: Conjunction = ALWAYS
    exceptions: frozenset[Exceptional] = frozenset()

    def value(self, name: str) -> Conjunction:
        """What the member of a name must be."""
        for other, value in self.named:
            if other == name:
                return value
        found = [(matches(pattern, name), value) for pattern, value in self.patterns]
        values = [value for is_match, value in found if is_match is not False]
        return both(*values) if any(match for match, _ in found) else both(self.rest, *values)

    def intersection(self, other: "ObjectSet") -> "ObjectSet | None":
        """None where nothing is in both, as far as that can be told."""
        names = dict.fromkeys([name for name, _ in (*self.named, *other.named)])
        named = tuple((name, both(self.value(name), other.value(name))) for name in names)
        mine, theirs = dict(self.patterns), dict(other.patterns)
        patterns = {
            pattern: both(mine.get(pattern, self.rest), theirs.get(pattern, other.rest))
            for pattern in (*mine, *theirs)
        }
        highs = [high for high in (self.high, other.high) if high is not None]
        return ObjectSet(
            named,
            tuple(patterns.items()),
            both(self.rest, other.rest),
            self.required | other.required,
            max(self.low, other.low),
            min(highs, default=None),
            both(self.names, other.names),
            self.exceptions | other.exceptions,
        ).settled()

    def settled(self, is_never: Callable[[Conjunction], bool] | None = None) -> "ObjectSet | None":
        """The same, in a shorter form; None where it is empty, as far as that can be told."""
        least = max(self.low, len(self.required))
        if self.high is not None and least > self.high:
            return None
        is_never = is_never or NEVER.__eq__
        named = tuple((name, NEVER if is_never(value) else value) for name, value in self.named)
        known = {name for name, _ in named}
        for name in self.required - known:
            if is_never(self.value(name)):
                return None
        if any(value == NEVER and name in self.required for name, value in named):
            return None
        return replace(self, named=named)

    def needed(self) -> Iterator[Conjunction]:
        """What must be possible for there to be any."""
        yield from (self.value(name) for name in self.required)

    def with_member(self, name: str, value: Conjunction = ALWAYS) -> "ObjectSet | None":
        """Those that have a member."""
        return self.intersection(ObjectSet(((name, value),), required=frozenset([name])))

    def without_member(self, name: str) -> "ObjectSet | None":
        """Those that have it not."""
        return self.intersection(ObjectSet(((name, NEVER),)))

    @property
    def _optional(self) -> list[str]:
        return [n for n, value in self.named if value != NEVER and n not in self.required]

    @property
    def _is_closed(self) -> bool:
        return self.rest == NEVER and all(value == NEVER for _, value in self.patterns)

    def choices(self) -> Iterator["ObjectSet"]:
        """The same without exceptions, and with `low` and `high` where the compiler can count.

        Some are left out where there would be too many.
        """
        if self.exceptions:
            exception = min(self.exceptions, key=repr)
            others = replace(self, exceptions=self.exceptions - {exception})
            for choice in others._excepted(exception):
                yield from choice.choices()
            return
        yield from itertools.islice(self._counted(), _MOST_CHOICES)

    def _excepted(self, exception: Exceptional) -> Iterator["ObjectSet"]:
        """With a member that is an exception; where its name is free, all free ones are."""
        for name, _ in self.named:
            if name in exception.but_names:
                continue
            if any(matches(p, name) is not False for p in exception.but_patterns):
                continue
            if exception.only_pattern and matches(exception.only_pattern, name) is not True:
                continue
            if exception.key == ALWAYS and (one := self.with_member(name, exception.value)):
                yield one
        if self._is_closed or exception.key != ALWAYS:
            return
        named = dict.fromkeys((*self._optional, *sorted(exception.but_names - self.required)))
        sizes = range(len(named) + 1) if len(named) <= _FEW else (0,)
        for size in sizes:
            for chosen in itertools.combinations(named, size):
                bare: ObjectSet | None = self
                for name in named:
                    if bare is not None:
                        wanted = name in chosen
                        bare = bare.with_member(name) if wanted else bare.without_member(name)
                if bare is not None and (one := bare._with_free(exception)) is not None:
                    yield one

    def _with_free(self, exception: Exceptional) -> "ObjectSet | None":
        """With at least one member of a name that is not known; all such are exceptions then."""
        named = tuple((name, ALWAYS) for name, _ in self.named)
        if only := exception.only_pattern:
            free = ObjectSet(named, ((only, exception.value),), NEVER)
        else:
            but = tuple((pattern, NEVER) for pattern in exception.but_patterns)
            free = ObjectSet(named, but, exception.value)
        return self.intersection(replace(free, low=len(self.required) + 1))

    def _counted(self) -> Iterator["ObjectSet"]:
        count, optional = len(self.required), self._optional
        low = self.low if self.low > count else 0
        high = self.high
        if high is not None and self._is_closed and high >= count + len(optional):
            high = None
        if not optional or (not low and high is None):
            yield replace(self, low=low, high=high)
            return
        most = len(optional) if high is None else min(len(optional), high - count)
        fewest = max(low - count, 0)
        if high is None and fewest <= len(optional):
            # of those that are named, so many are the first
            for last in range(len(optional)):
                for chosen in itertools.combinations(range(last), fewest - 1) if fewest else ():
                    picked = {*chosen, last}
                    gone = [n for i, n in enumerate(optional[:last]) if i not in picked]
                    yield from self._choosing([optional[i] for i in picked], gone, 0, None)
            most = fewest - 1
        for size in range(max(fewest, 0) if self._is_closed else 0, most + 1):
            for names in itertools.combinations(optional, size):
                gone = [name for name in optional if name not in names]
                yield from self._choosing(names, gone, low, high)

    def _choosing(
        self, chosen: "list[str] | tuple[str, ...]", gone: list[str], low: int, high: int | None
    ) -> Iterator["ObjectSet"]:
        members = tuple((name, NEVER if name in gone else value) for name, value in self.named)
        required = self.required | frozenset(chosen)
        if high is not None and len(required) > high:
            return
        low = low if low > len(required) else 0
        if low and self._is_closed:
            return
        if high is not None and self._is_closed:
            high = None
        yield replace(self, named=members, required=required, low=low, high=high)


EVERY_OBJECT = ObjectSet()
