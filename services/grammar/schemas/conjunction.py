"""Conjunctions of subschemas and negated subschemas, which members and items must satisfy."""

import json
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from services.common.json_values import Json
from services.grammar.schemas.references import References

__all__ = ["ALWAYS", "NEVER", "Conjunction", "Literals", "both"]

Conjunction: TypeAlias = frozenset[int]
"""Literals, all of which must hold: 2n for schema n, 2n + 1 for its negation"""

ALWAYS: Conjunction = frozenset()
NEVER: Conjunction = frozenset([0])  # schema 0 is false


def both(*parts: Conjunction) -> Conjunction:
    """Return the conjunction of all parts; NEVER for a contradiction."""
    joined: Conjunction = frozenset().union(*parts)
    if 0 in joined or any(literal ^ 1 in joined for literal in joined):
        return NEVER
    return joined


class Literals:
    """The numbered schemas of a document. Equal schemas share a number."""

    def __init__(self, references: References) -> None:
        self.references = references
        self._schemas: list[Mapping[str, Json]] = [{}]
        self._numbers: dict[int, int] = {}
        self._by_content: dict[str, int] = {}
        self._alive: list[Mapping[str, Json]] = []  # keeps the ids in `_numbers` unique

    def schema(self, literal: int) -> Mapping[str, Json]:
        """Return the schema of a literal, without its sign."""
        return self._schemas[literal >> 1]

    def path_of(self, literals: Iterable[int]) -> str:
        """Return the path of the first of the literals."""
        return self.references.path_of(self._schemas[min(literals, default=0) >> 1])

    def holds(self, schema: Json) -> Conjunction:
        """Return the conjunction that requires a schema."""
        for _ in range(100):
            if isinstance(schema, Mapping) and schema.keys() == {"$ref"}:
                schema = self.references.target(schema)
        if isinstance(schema, Mapping):
            return frozenset([2 * self._number(schema)]) if schema else ALWAYS
        return NEVER if schema is False else ALWAYS

    def fails(self, schema: Json) -> Conjunction:
        """Return the conjunction that requires the negation of a schema."""
        holds = self.holds(schema)
        if holds == NEVER:
            return ALWAYS
        return frozenset(literal ^ 1 for literal in holds) if holds else NEVER

    def _number(self, schema: Mapping[str, Json]) -> int:
        number = self._numbers.get(id(schema))
        if number is None:
            content = json.dumps(schema, sort_keys=True)
            number = None if '"$ref"' in content else self._by_content.get(content)
            if number is None:
                number = len(self._schemas)
                self._schemas.append(schema)
                self._by_content[content] = number
            self._numbers[id(schema)] = number
            self._alive.append(schema)
        return number
