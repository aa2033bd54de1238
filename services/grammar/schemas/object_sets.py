"""Sets of objects: members, names and sizes."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from services.grammar.schemas.conjunction import ALWAYS, NEVER, Conjunction, both
from services.grammar.schemas.string_sets import matches

__all__ = ["EVERY_OBJECT", "ObjectSet", "Witness"]

_MAX_ALTERNATIVES = 256
_FEW = 4  # names of which all combinations are tried


@dataclass(frozen=True, slots=True)
class Witness:
    """A member that must exist. Its name is none of `but_names`, and matches no `but_patterns`."""

    value: Conjunction
    but_names: frozenset[str] = frozenset()
    but_patterns: frozenset[str] = frozenset()
    only_pattern: str | None = None
    key: Conjunction = ALWAYS
    """The conjunction that its name must satisfy"""


@dataclass(frozen=True, slots=True)
class ObjectSet:
    """The objects that satisfy all constraints."""

    named: tuple[tuple[str, Conjunction], ...] = ()
    """Values by name. They include the constraints of matching patterns."""
    patterns: tuple[tuple[str, Conjunction], ...] = ()
    """Values of other members by pattern; all matching ones apply."""
    rest: Conjunction = ALWAYS
    """Values of all further members"""
    required: frozenset[str] = frozenset()
    low: int = 0
    high: int | None = None
    witnesses: frozenset[Witness] = frozenset()

    def value(self, name: str) -> Conjunction:
        """Return the conjunction that the member of a name must satisfy."""
        for other, value in self.named:
            if other == name:
                return value
        found = [(matches(pattern, name), value) for pattern, value in self.patterns]
        values = [value for is_match, value in found if is_match is not False]
        return both(*values) if any(match for match, _ in found) else both(self.rest, *values)

    def intersection(self, other: "ObjectSet") -> "ObjectSet | None":
        """Return the objects in both sets, or None if they are known to be disjoint."""
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
            self.witnesses | other.witnesses,
        ).normalized()

    def normalized(
        self, is_unsatisfiable: Callable[[Conjunction], bool] | None = None
    ) -> "ObjectSet | None":
        """Forbid unsatisfiable members. Return None for a set that is known to be empty."""
        least = max(self.low, len(self.required))
        if self.high is not None and least > self.high:
            return None
        is_unsatisfiable = is_unsatisfiable or NEVER.__eq__
        named = tuple(
            (name, NEVER if is_unsatisfiable(value) else value) for name, value in self.named
        )
        known = {name for name, _ in named}
        for name in self.required - known:
            if is_unsatisfiable(self.value(name)):
                return None
        if any(value == NEVER and name in self.required for name, value in named):
            return None
        return replace(self, named=named)

    def needed(self) -> Iterator[Conjunction]:
        """Yield the conjunctions that must be satisfiable for the set not to be empty."""
        yield from (self.value(name) for name in self.required)

    def with_member(self, name: str, value: Conjunction = ALWAYS) -> "ObjectSet | None":
        """Return the objects of the set that have a member, or None."""
        return self.intersection(ObjectSet(((name, value),), required=frozenset([name])))

    def without_member(self, name: str) -> "ObjectSet | None":
        """Return the objects of the set that lack a member, or None."""
        return self.intersection(ObjectSet(((name, NEVER),)))

    @property
    def _optional(self) -> list[str]:
        return [n for n, value in self.named if value != NEVER and n not in self.required]

    @property
    def _is_closed(self) -> bool:
        return self.rest == NEVER and all(value == NEVER for _, value in self.patterns)

    def alternatives(self) -> Iterator["ObjectSet"]:
        """Yield sets whose union is the set, or a part of it where there are too many.

        They have no witnesses, and bounds of size only where llguidance can count.
        """
        if self.witnesses:
            witness = min(self.witnesses, key=repr)
            others = replace(self, witnesses=self.witnesses - {witness})
            for witnessed in others._witnessed(witness):
                yield from witnessed.alternatives()
            return
        yield from itertools.islice(self._counted(), _MAX_ALTERNATIVES)

    def _witnessed(self, witness: Witness) -> Iterator["ObjectSet"]:
        """Yield the cases of a witness: each named member, then some or all unnamed ones."""
        for name, _ in self.named:
            if name in witness.but_names:
                continue
            if any(matches(p, name) is not False for p in witness.but_patterns):
                continue
            if witness.only_pattern and matches(witness.only_pattern, name) is not True:
                continue
            if witness.key == ALWAYS and (one := self.with_member(name, witness.value)):
                yield one
        if self._is_closed or witness.key != ALWAYS:
            return
        named = dict.fromkeys((*self._optional, *sorted(witness.but_names - self.required)))
        sizes = range(len(named) + 1) if len(named) <= _FEW else (0,)
        for size in sizes:
            for chosen in itertools.combinations(named, size):
                bare: ObjectSet | None = self
                for name in named:
                    if bare is not None:
                        wanted = name in chosen
                        bare = bare.with_member(name) if wanted else bare.without_member(name)
                if bare is not None and (one := bare._with_unnamed(witness)) is not None:
                    yield one

    def _with_unnamed(self, witness: Witness) -> "ObjectSet | None":
        """Require at least one unnamed member, and that every unnamed member is a witness."""
        named = tuple((name, ALWAYS) for name, _ in self.named)
        if only := witness.only_pattern:
            free = ObjectSet(named, ((only, witness.value),), NEVER)
        else:
            but = tuple((pattern, NEVER) for pattern in witness.but_patterns)
            free = ObjectSet(named, but, witness.value)
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
            # the first `fewest` of the optional members that occur
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
