"""Lowering of JSON Schemas to the keywords that llguidance enforces exactly.

Native subschemas stay as they are. Each other one is brought to its normal form, and written as
alternatives: one native schema per set of values.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.schemas.array_sets import ArraySet
from services.grammar.schemas.conjunction import ALWAYS, NEVER, Conjunction, Literals
from services.grammar.schemas.json_positions import UNIQUE
from services.grammar.schemas.keywords import EVERYTHING, KINDS
from services.grammar.schemas.native_subset import NON_ASSERTIONS, non_native
from services.grammar.schemas.normal_forms import NormalForms, TooManyCombinationsError
from services.grammar.schemas.number_sets import NumberSet
from services.grammar.schemas.object_sets import ObjectSet
from services.grammar.schemas.references import References
from services.grammar.schemas.string_sets import StringSet

__all__ = ["lower"]

_MAX_SETS = 128, 12, 3  # per kind of values in a form; tried in turn until the result fits
_MAX_DEFINITIONS = 3000
_MAX_PARTS = 30_000  # members and items of all definitions


def lower(schema: Json, path: str = "$") -> Json:
    """Return an equivalent native schema: the same object where the schema is native.

    Raises GrammarError, with keyword and path, where no grammar can enforce the schema.
    """
    if not isinstance(schema, Mapping):
        return {} if schema is True else schema
    references = References(schema, path)
    non_native_ids = non_native(schema, references)
    if not non_native_ids:
        return schema
    try:
        for max_sets in _MAX_SETS[:-1]:
            with contextlib.suppress(TooManyCombinationsError):
                return _Writer(schema, references, non_native_ids, max_sets).write()
        return _Writer(schema, references, non_native_ids, _MAX_SETS[-1]).write()
    except RecursionError:
        raise GrammarError(f"The schema at {path} is nested too deeply to be resolved.") from None


@dataclass(slots=True)
class _Definition:
    """The sets of values that satisfy a conjunction."""

    sets: list[tuple[str, Any]] = field(default_factory=list)
    """Pairs of a kind and a set; native keywords can express each set."""
    unenforceable: dict[str, str] = field(default_factory=dict)
    """Kinds with sets that no grammar can enforce, and the keyword to blame"""
    is_satisfiable: bool = False
    """True if some finite value satisfies the conjunction"""


class _Writer:
    """The translation of one document."""

    def __init__(
        self,
        schema: Mapping[str, Json],
        references: References,
        non_native_ids: set[int],
        max_sets: int,
    ) -> None:
        draft = str(schema.get("$schema", ""))
        self._references = references
        self._literals = Literals(references)
        self._forms = NormalForms(
            self._literals, any(f"draft-0{n}" in draft for n in (3, 4, 6, 7)), max_sets
        )
        self._non_native = non_native_ids
        self._root = self._literals.holds(schema)
        self._definitions: dict[Conjunction, _Definition] = {}
        self._names: dict[Conjunction, str] = {}
        self._written: dict[str, Json] = {}
        self._pending: list[Conjunction] = []
        self._parts = 0

    def write(self) -> Json:
        """Return the lowered document."""
        self._define_all()
        self._find_satisfiable()
        root = self._definitions.get(self._root)
        if self._root == NEVER or (root is not None and not root.is_satisfiable):
            reasons = [r for one in self._definitions.values() for r in one.unenforceable.values()]
            why = f": {reasons[0]} can't be enforced" if reasons else ""
            raise GrammarError(f"No text satisfies the grammar{why}.")
        written = dict(self._content(self._root))
        while self._pending:
            conjunction = self._pending.pop()
            self._written[self._names[conjunction]] = self._content(conjunction)
        return {**written, "$defs": self._written}

    def _native(self, conjunction: Conjunction) -> Mapping[str, Json] | None:
        """Return the native schema that a conjunction consists of, or None."""
        if len(conjunction) != 1 or min(conjunction) & 1:
            return None
        schema = self._literals.schema(min(conjunction))
        return None if id(schema) in self._non_native else schema

    def _define_all(self) -> None:
        pending = [self._root]
        while pending:
            conjunction = pending.pop()
            if conjunction in self._definitions or conjunction in (ALWAYS, NEVER):
                continue
            definition = self._definitions[conjunction] = _Definition()
            if len(self._definitions) > _MAX_DEFINITIONS or self._parts > _MAX_PARTS:
                where = self._literals.path_of(conjunction)
                raise TooManyCombinationsError(
                    f"The schema has too many combinations at {where}; simplify it."
                )
            if self._native(conjunction) is not None:
                definition.is_satisfiable = True
                continue
            form = self._forms.of(conjunction)
            for kind in KINDS:
                for one in form[kind]:
                    self._add(definition, kind, one)
            for _, value_set in definition.sets:
                children = [child for child, _ in _children(value_set)]
                self._parts += 1 + len(children)
                pending += children

    def _add(self, definition: _Definition, kind: str, one: Any) -> None:
        obstacle = None if isinstance(one, frozenset | ObjectSet) else one.obstacle()
        if obstacle:
            definition.unenforceable[kind] = obstacle
            return
        alternatives = list(one.alternatives()) if isinstance(one, ArraySet | ObjectSet) else [one]
        if not alternatives:
            definition.unenforceable[kind] = "The schema of its members"
        definition.sets += [(kind, alternative) for alternative in alternatives]

    def _find_satisfiable(self) -> None:
        """Set `is_satisfiable` of all definitions, as a least fixed point."""
        changes = True
        while changes:
            changes = False
            for definition in self._definitions.values():
                if not definition.is_satisfiable and any(
                    self._is_nonempty(value_set) for _, value_set in definition.sets
                ):
                    definition.is_satisfiable = changes = True

    def _is_nonempty(self, value_set: Any) -> bool:
        return all(self._is_satisfiable(child) for child, needed in _children(value_set) if needed)

    def _is_satisfiable(self, conjunction: Conjunction) -> bool:
        if conjunction in (ALWAYS, NEVER):
            return conjunction == ALWAYS
        return self._definitions[conjunction].is_satisfiable

    def _refer(self, conjunction: Conjunction) -> dict[str, Json] | bool:
        """Return a schema for a conjunction, by reference if it has arrays or objects."""
        if conjunction == ALWAYS:
            return {}
        if not self._is_satisfiable(conjunction):
            self._refuse_unenforceable(conjunction, ())
            return False
        sets = self._definitions[conjunction].sets
        if sets and all(kind not in ("array", "object") for kind, _ in sets):
            return self._content(conjunction)
        name = self._names.get(conjunction)
        if name is None:
            name = self._names[conjunction] = str(len(self._names))
            self._pending.append(conjunction)
        return {"$ref": f"#/$defs/{name}"}

    def _content(self, conjunction: Conjunction) -> dict[str, Json]:
        native = self._native(conjunction)
        if native is not None:
            copy: dict[str, Json] = self._copy(native)
            return copy
        definition = self._definitions[conjunction]
        by_kind: dict[str, list[Any]] = {}
        for kind, value_set in definition.sets:
            if self._is_nonempty(value_set):
                by_kind.setdefault(kind, []).append(value_set)
        self._refuse_unenforceable(conjunction, by_kind)
        if by_kind == EVERYTHING:
            return {}
        alternatives: list[dict[str, Json]] = []
        for kind, sets in by_kind.items():
            for value_set in sets:
                alternatives += self._schemas(kind, value_set)
        return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}

    def _refuse_unenforceable(self, conjunction: Conjunction, kinds: Collection[str]) -> None:
        """Raise GrammarError where one of the client's schemas lost all values of a kind."""
        definition = self._definitions.get(conjunction)
        if definition and len(conjunction) == 1 and not min(conjunction) & 1:
            for kind in definition.unenforceable.keys() - kinds:
                where = self._literals.path_of(conjunction)
                raise GrammarError(
                    f"{definition.unenforceable[kind]} can't be enforced at {where}."
                )

    def _schemas(self, kind: str, value_set: Any) -> Iterator[dict[str, Json]]:
        if value_set in EVERYTHING[kind]:
            yield {"type": kind}
        elif isinstance(value_set, NumberSet):
            yield from value_set.schemas()
        elif isinstance(value_set, StringSet):
            yield value_set.schema()
        elif isinstance(value_set, ArraySet):
            yield self._array(value_set)
        elif isinstance(value_set, ObjectSet):
            yield self._object(value_set)
        else:
            yield {"enum": sorted(value_set)}

    def _array(self, value_set: ArraySet) -> dict[str, Json]:
        schema: dict[str, Json] = {"type": "array"}
        if value_set.prefix:
            schema["prefixItems"] = [self._refer(item) for item in value_set.prefix]
        if value_set.rest != ALWAYS:
            schema["items"] = self._refer(value_set.rest)
        if value_set.low:
            schema["minItems"] = value_set.low
        if value_set.high is not None:
            schema["maxItems"] = value_set.high
        if value_set.unique and (value_set.high is None or value_set.high > 1):
            schema[UNIQUE] = True
        return schema

    def _object(self, value_set: ObjectSet) -> dict[str, Json]:
        schema: dict[str, Json] = {"type": "object"}
        if value_set.named:
            schema["properties"] = {name: self._refer(value) for name, value in value_set.named}
        if value_set.patterns:
            schema["patternProperties"] = self._by_pattern(value_set.patterns)
        if value_set.rest != ALWAYS:
            schema["additionalProperties"] = self._refer(value_set.rest)
        if value_set.required:
            known = [name for name, _ in value_set.named if name in value_set.required]
            schema["required"] = [*known, *sorted(value_set.required.difference(known))]
        if value_set.low:
            schema["minProperties"] = value_set.low
        if value_set.high is not None:
            schema["maxProperties"] = value_set.high
        return schema

    def _by_pattern(self, patterns: Sequence[tuple[str, Conjunction]]) -> dict[str, Json]:
        """Return values by pattern, with all patterns of one value joined."""
        by_value: dict[Conjunction, list[str]] = {}
        for pattern, value in patterns:
            by_value.setdefault(value, []).append(pattern)
        return {
            ms[0] if len(ms) == 1 else "|".join(f"(?:{m})" for m in ms): self._refer(value)
            for value, ms in by_value.items()
        }

    def _copy(self, schema: Any) -> Any:
        """Return a copy of a native schema with references to the written definitions."""
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema:
            return self._refer_native(self._references.target(schema))
        copy: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in NON_ASSERTIONS:
                continue
            if keyword in ("properties", "patternProperties"):
                copy[keyword] = {name: self._copy(one) for name, one in value.items()}
            elif keyword in ("allOf", "anyOf", "prefixItems") or (
                keyword == "items" and isinstance(value, list)
            ):
                copy[keyword] = [self._copy(one) for one in value]
            elif keyword in ("additionalItems", "additionalProperties", "items"):
                copy[keyword] = self._copy(value)
            else:
                copy[keyword] = value
        return copy

    def _refer_native(self, schema: Json) -> Json:
        conjunction = self._literals.holds(schema)
        if conjunction not in (ALWAYS, NEVER):
            self._definitions.setdefault(conjunction, _Definition(is_satisfiable=True))
        return self._refer(conjunction)


def _children(value_set: Any) -> Iterator[tuple[Conjunction, bool]]:
    """Yield what members of a set must satisfy, and whether such a member must exist."""
    if isinstance(value_set, ArraySet | ObjectSet):
        for needed in value_set.needed():
            yield needed, True
        others = value_set.prefix if isinstance(value_set, ArraySet) else [
            value for _, value in (*value_set.named, *value_set.patterns)
        ]  # fmt: skip
        for value in (*others, value_set.rest):
            yield value, False
