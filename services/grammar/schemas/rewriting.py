"""JSON Schemas made plain: the same values, in the keywords that llguidance holds exactly.

What needs no rewriting stays as it is. The rest is brought to a normal form (`normal_forms`),
which is written down as alternatives: one plain schema for each set of values.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.common.json_values import Json
from services.grammar.error import GrammarError
from services.grammar.schemas.array_sets import ArraySet
from services.grammar.schemas.conjunction import ALWAYS, NEVER, Conjunction, Literals
from services.grammar.schemas.json_positions import UNIQUE
from services.grammar.schemas.keywords import EVERYTHING, KINDS
from services.grammar.schemas.normal_forms import NormalForms, TooManyCombinationsError
from services.grammar.schemas.number_sets import NumberSet
from services.grammar.schemas.object_sets import ObjectSet
from services.grammar.schemas.plainness import REMARKS, hard_parts
from services.grammar.schemas.references import References
from services.grammar.schemas.string_sets import StringSet

__all__ = ["rewrite"]

_MOST_SETS = 128, 12, 3  # of one kind of values in a schema, tried in turn
_MOST_DEFINITIONS = 3000
_MOST_PARTS = 30_000  # members and items of them, together


def rewrite(schema: Json, path: str = "$") -> Json:
    """The schema in plain keywords; the very same where it is plain.

    Raises GrammarError with the keyword and its path where no grammar can hold it.
    """
    if not isinstance(schema, Mapping):
        return {} if schema is True else schema
    references = References(schema, path)
    hard = hard_parts(schema, references)
    if not hard:
        return schema
    try:
        for most_sets in _MOST_SETS[:-1]:
            with contextlib.suppress(TooManyCombinationsError):
                return _Writer(schema, references, hard, most_sets).write()
        return _Writer(schema, references, hard, _MOST_SETS[-1]).write()
    except RecursionError:
        raise GrammarError(f"The schema at {path} is too deep to be resolved.") from None


@dataclass(slots=True)
class _Definition:
    """What is written for a conjunction."""

    shapes: list[tuple[str, Any]] = field(default_factory=list)
    """Sets of values by kind, each of which plain keywords hold"""
    lost: dict[str, str] = field(default_factory=dict)
    """Kinds of which sets were left out, and why"""
    is_possible: bool = False


class _Writer:
    """Writes a document anew."""

    def __init__(
        self,
        schema: Mapping[str, Json],
        references: References,
        hard: set[int],
        most_sets: int,
    ) -> None:
        draft = str(schema.get("$schema", ""))
        self._references = references
        self._literals = Literals(references)
        self._forms = NormalForms(
            self._literals, any(f"draft-0{n}" in draft for n in (3, 4, 6, 7)), most_sets
        )
        self._hard = hard
        self._root = self._literals.holds(schema)
        self._definitions: dict[Conjunction, _Definition] = {}
        self._names: dict[Conjunction, str] = {}
        self._written: dict[str, Json] = {}
        self._pending: list[Conjunction] = []
        self._parts = 0

    def write(self) -> Json:
        """The plain schema."""
        self._define_all()
        self._find_possible()
        root = self._definitions.get(self._root)
        if self._root == NEVER or (root is not None and not root.is_possible):
            reasons = [r for one in self._definitions.values() for r in one.lost.values()]
            why = f": {reasons[0]} can't be held" if reasons else ""
            raise GrammarError(f"No text satisfies the grammar{why}.")
        written = dict(self._content(self._root))
        while self._pending:
            conjunction = self._pending.pop()
            self._written[self._names[conjunction]] = self._content(conjunction)
        return {**written, "$defs": self._written}

    def _plain(self, conjunction: Conjunction) -> Mapping[str, Json] | None:
        """The schema that can be copied for a conjunction."""
        if len(conjunction) != 1 or min(conjunction) & 1:
            return None
        schema = self._literals.schema(min(conjunction))
        return None if id(schema) in self._hard else schema

    def _define_all(self) -> None:
        pending = [self._root]
        while pending:
            conjunction = pending.pop()
            if conjunction in self._definitions or conjunction in (ALWAYS, NEVER):
                continue
            definition = self._definitions[conjunction] = _Definition()
            if len(self._definitions) > _MOST_DEFINITIONS or self._parts > _MOST_PARTS:
                where = self._literals.path_of(conjunction)
                raise TooManyCombinationsError(
                    f"The schema has too many combinations at {where}; simplify it."
                )
            if self._plain(conjunction) is not None:
                definition.is_possible = True
                continue
            form = self._forms.of(conjunction)
            for kind in KINDS:
                for one in form[kind]:
                    self._add(definition, kind, one)
            for _, shape in definition.shapes:
                children = [child for child, _ in _children(shape)]
                self._parts += 1 + len(children)
                pending += children

    def _add(self, definition: _Definition, kind: str, one: Any) -> None:
        obstacle = None if isinstance(one, frozenset | ObjectSet) else one.obstacle()
        if obstacle:
            definition.lost[kind] = obstacle
            return
        choices = list(one.choices()) if isinstance(one, ArraySet | ObjectSet) else [one]
        if not choices:
            definition.lost[kind] = "What its members must be"
        definition.shapes += [(kind, choice) for choice in choices]

    def _find_possible(self) -> None:
        """Which conjunctions some finite value satisfies."""
        changes = True
        while changes:
            changes = False
            for definition in self._definitions.values():
                if not definition.is_possible and any(
                    self._can_be(shape) for _, shape in definition.shapes
                ):
                    definition.is_possible = changes = True

    def _can_be(self, shape: Any) -> bool:
        return all(self._is_possible(child) for child, needed in _children(shape) if needed)

    def _is_possible(self, conjunction: Conjunction) -> bool:
        if conjunction in (ALWAYS, NEVER):
            return conjunction == ALWAYS
        return self._definitions[conjunction].is_possible

    def _refer(self, conjunction: Conjunction) -> dict[str, Json] | bool:
        """A schema that stands for a conjunction."""
        if conjunction == ALWAYS:
            return {}
        if not self._is_possible(conjunction):
            self._refuse_lost(conjunction, ())
            return False
        shapes = self._definitions[conjunction].shapes
        if shapes and all(kind not in ("array", "object") for kind, _ in shapes):
            return self._content(conjunction)
        name = self._names.get(conjunction)
        if name is None:
            name = self._names[conjunction] = str(len(self._names))
            self._pending.append(conjunction)
        return {"$ref": f"#/$defs/{name}"}

    def _content(self, conjunction: Conjunction) -> dict[str, Json]:
        plain = self._plain(conjunction)
        if plain is not None:
            copy: dict[str, Json] = self._copy(plain)
            return copy
        definition = self._definitions[conjunction]
        by_kind: dict[str, list[Any]] = {}
        for kind, shape in definition.shapes:
            if self._can_be(shape):
                by_kind.setdefault(kind, []).append(shape)
        self._refuse_lost(conjunction, by_kind)
        if by_kind == EVERYTHING:
            return {}
        alternatives: list[dict[str, Json]] = []
        for kind, shapes in by_kind.items():
            for shape in shapes:
                alternatives += self._schemas(kind, shape)
        return alternatives[0] if len(alternatives) == 1 else {"anyOf": alternatives}

    def _refuse_lost(self, conjunction: Conjunction, kinds: Collection[str]) -> None:
        """Raise GrammarError where the client's own schema has no values of a kind any more."""
        definition = self._definitions.get(conjunction)
        if definition and len(conjunction) == 1 and not min(conjunction) & 1:
            for kind in definition.lost.keys() - kinds:
                where = self._literals.path_of(conjunction)
                raise GrammarError(f"{definition.lost[kind]} can't be held at {where}.")

    def _schemas(self, kind: str, shape: Any) -> Iterator[dict[str, Json]]:
        if shape in EVERYTHING[kind]:
            yield {"type": kind}
        elif isinstance(shape, NumberSet | StringSet):
            yield from shape.schemas()
        elif isinstance(shape, ArraySet):
            yield self._array(shape)
        elif isinstance(shape, ObjectSet):
            yield self._object(shape)
        else:
            yield {"enum": sorted(shape)}

    def _array(self, shape: ArraySet) -> dict[str, Json]:
        schema: dict[str, Json] = {"type": "array"}
        if shape.prefix:
            schema["prefixItems"] = [self._refer(item) for item in shape.prefix]
        if shape.rest != ALWAYS:
            schema["items"] = self._refer(shape.rest)
        if shape.low:
            schema["minItems"] = shape.low
        if shape.high is not None:
            schema["maxItems"] = shape.high
        if shape.unique and (shape.high is None or shape.high > 1):
            schema[UNIQUE] = True
        return schema

    def _object(self, shape: ObjectSet) -> dict[str, Json]:
        schema: dict[str, Json] = {"type": "object"}
        if shape.named:
            schema["properties"] = {name: self._refer(value) for name, value in shape.named}
        if shape.patterns:
            schema["patternProperties"] = self._by_pattern(shape.patterns)
        if shape.rest != ALWAYS:
            schema["additionalProperties"] = self._refer(shape.rest)
        if shape.required:
            known = [name for name, _ in shape.named if name in shape.required]
            schema["required"] = [*known, *sorted(shape.required.difference(known))]
        if shape.low:
            schema["minProperties"] = shape.low
        if shape.high is not None:
            schema["maxProperties"] = shape.high
        return schema

    def _by_pattern(self, patterns: Sequence[tuple[str, Conjunction]]) -> dict[str, Json]:
        """Values by pattern; patterns of one value are one."""
        by_value: dict[Conjunction, list[str]] = {}
        for pattern, value in patterns:
            by_value.setdefault(value, []).append(pattern)
        return {
            ms[0] if len(ms) == 1 else "|".join(f"(?:{m})" for m in ms): self._refer(value)
            for value, ms in by_value.items()
        }

    def _copy(self, schema: Any) -> Any:
        """A plain schema, its references led to where their targets are written."""
        if isinstance(schema, bool):
            return schema
        if "$ref" in schema:
            return self._refer_plain(self._references.target(schema))
        copy: dict[str, Any] = {}
        for keyword, value in schema.items():
            if keyword in REMARKS:
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

    def _refer_plain(self, schema: Json) -> Json:
        conjunction = self._literals.holds(schema)
        if conjunction not in (ALWAYS, NEVER):
            self._definitions.setdefault(conjunction, _Definition(is_possible=True))
        return self._refer(conjunction)


def _children(shape: Any) -> Iterator[tuple[Conjunction, bool]]:
    """What the members of a shape must be, and whether there must be one."""
    if isinstance(shape, ArraySet | ObjectSet):
        for needed in shape.needed():
            yield needed, True
        others = shape.prefix if isinstance(shape, ArraySet) else [
            value for _, value in (*shape.named, *shape.patterns)
        ]  # fmt: skip
        for value in (*others, shape.rest):
            yield value, False
