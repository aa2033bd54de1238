"""Conjunctions of subschemas and of negated ones, by number: what a member or an item must be."""

import json
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from services.common.json_values import Json
from services.grammar.schemas.references import References

__all__ = ["ALWAYS", "NEVER", "Conjunction", "Literals", "both"]

Conjunction: TypeAlias = frozenset[int]
"""Literals that must all hold: twice a schema's number, and one more where it must not hold."""

ALWAYS: Conjunction = frozenset()
NEVER: Conjunction = frozenset([0])  # the literal of schema 0, which is false


def both(*parts: Conjunction) -> Conjunction:
    """What holds where all parts hold."""
    joined: Conjunction = frozenset().union(*parts)
    if 0 in joined or any(literal ^ 1 in joined for literal in joined):
        return NEVER
    return joined


class Literals:
    """Numbers for the schemas of a document. Equal ones have one number."""

    def __init__(self, references: References) -> None:
        self.references = references
        self._schemas: list[Mapping[str, Json]] = [{}]
        self._numbers: dict[int, int] = {}
        self._by_content: dict[str, int] = {}
        self._kept: list[Mapping[str, Json]] = []  # so that no other gets the id of one

    def schema(self, literal: int) -> Mapping[str, Json]:
        """What a literal speaks of."""
        return self._schemas[literal >> 1]

    def path_of(self, literals: Iterable[int]) -> str:
        """Where the first of them is."""
        return self.references.path_of(self._schemas[min(literals, default=0) >> 1])

    def holds(self, schema: Json) -> Conjunction:
        """That a schema holds."""
        for _ in range(100):
            if isinstance(schema, Mapping) and schema.keys() == {"$ref"}:
                schema = self.references.target(schema)
        if isinstance(schema, Mapping):
            return frozenset([2 * self._number(schema)]) if schema else ALWAYS
        return NEVER if schema is False else ALWAYS

    def fails(self, schema: Json) -> Conjunction:
        """That a schema does not hold."""
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
            self._kept.append(schema)
        return number
