"""Normal forms of JSON Schemas: unions of sets of values, without "not", "oneOf" and the like."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.patterns.full_match import full_match_expressions
from services.grammar.schemas.array_sets import ArraySet, Contained
from services.grammar.schemas.conjunction import ALWAYS, NEVER, Conjunction, Literals, both
from services.grammar.schemas.keywords import (
    EVERYTHING,
    KINDS,
    NormalForm,
    Set,
    array_of,
    assertion_form,
    count_of,
    items_of,
    limit_of,
    negated_assertion_form,
    numbers_of,
    object_of,
    strings_of,
    union,
)
from services.grammar.schemas.number_sets import NumberSet, number_of
from services.grammar.schemas.object_sets import ObjectSet, Witness
from services.grammar.schemas.string_sets import EVERY_STRING, StringSet, are_disjoint

__all__ = ["NormalForms", "TooManyCombinationsError"]

# Expressions of `full_match`: any text, any text with a non-empty line, only line ends
_ANY = re.compile(r"\^\(\?:(\(\?s:\.\)\*)*((\[[^\]]+\]|\w)\*)?\(\?s:\.\)\*\)\$")
_ANYTHING = frozenset(
    expression for p in (".", ".+") for expression in full_match_expressions(p) or ()
)
_LINE_ENDS = r"^(?:\x{a}*)$"
_MAX_INTERSECTIONS = 25_000  # per document
_EMPTINESS_DEPTH = 3  # levels of members that the test for an empty set examines


class TooManyCombinationsError(GrammarError):
    """A schema has too many alternatives to enumerate."""


class _CycleError(Exception):
    """A form depends on itself."""


class NormalForms:
    """The normal forms of the conjunctions of schemas in a document, computed on demand."""

    def __init__(self, literals: Literals, ignores_siblings: bool, max_sets: int) -> None:
        """`ignores_siblings`: the document's draft ignores keywords beside "$ref".

        `max_sets` bounds the sets of one kind in a form. Further sets are dropped, which narrows
        the form and is safe: negation applies to schemas, never to forms.
        """
        self._literals = literals
        self._max_sets = max_sets
        self._ignores_siblings = ignores_siblings
        self._known: dict[Conjunction, NormalForm] = {}
        self._unsatisfiable: dict[tuple[Conjunction, int], bool] = {}
        self._in_progress: set[Conjunction] = set()
        self._intersections = 0

    def of(self, conjunction: Conjunction) -> NormalForm:
        """Return the form of a conjunction; raise GrammarError where it depends on itself."""
        try:
            return self._form(conjunction)
        except _CycleError:
            where = self._literals.path_of(conjunction)
            raise GrammarError(f"The schema at {where} refers to itself without end.") from None

    def _form(self, conjunction: Conjunction) -> NormalForm:
        known = self._known.get(conjunction)
        if known is None:
            if conjunction in self._in_progress:
                raise _CycleError
            self._in_progress.add(conjunction)
            try:
                known = self._computed(conjunction)
            finally:
                self._in_progress.discard(conjunction)
            self._known[conjunction] = known
        return known

    def is_unsatisfiable(self, conjunction: Conjunction, depth: int = _EMPTINESS_DEPTH) -> bool:
        """Return whether no value satisfies a conjunction, judged by `depth` levels of members."""
        if conjunction in (ALWAYS, NEVER) or not depth:
            return conjunction == NEVER
        if conjunction in self._in_progress:
            return False
        key = conjunction, depth
        if key not in self._unsatisfiable:
            try:
                form = self._form(conjunction)
            except _CycleError:
                return False
            self._unsatisfiable[key] = all(
                self._is_empty(one, depth - 1) for kind in KINDS for one in form[kind]
            )
        return self._unsatisfiable[key]

    def _is_empty(self, one: Set, depth: int) -> bool:
        if isinstance(one, ArraySet | ObjectSet):
            return any(self.is_unsatisfiable(needed, depth) for needed in one.needed())
        return False

    def _computed(self, conjunction: Conjunction) -> NormalForm:
        if conjunction == NEVER:
            return union()
        literals = sorted(conjunction)
        if len(literals) != 1:
            forms = [self._form(frozenset([literal])) for literal in literals]
            return self._intersection(forms, self._literals.path_of(conjunction))
        [literal] = literals
        schema = self._literals.schema(literal)
        path = self._literals.references.path_of(schema)
        return self._negation(schema, path) if literal & 1 else self._schema(schema, path)

    def _intersection(self, forms: Iterable[NormalForm], path: str) -> NormalForm:
        result: dict[str, Sequence[Set]] = dict(EVERYTHING)
        for form in forms:
            result = {kind: self._product(result[kind], form[kind], path) for kind in KINDS}
        return result

    def _product(self, some: Sequence[Any], others: Sequence[Any], path: str) -> Sequence[Set]:
        found: dict[Set, None] = {}
        for one in some:
            for other in others:
                self._intersections += 1
                if self._intersections > _MAX_INTERSECTIONS:
                    raise TooManyCombinationsError(
                        f"The schema at {path} has too many combinations of its alternatives; "
                        "simplify it."
                    )
                if len(found) < self._max_sets and (common := self._common(one, other)) is not None:
                    found[common] = None
        return list(found)

    def _common(self, one: Any, other: Any) -> Set | None:
        if isinstance(one, frozenset):
            return one & other or None
        common: Set | None = one.intersection(other)
        if isinstance(common, ObjectSet):
            common = common.normalized(lambda value: self.is_unsatisfiable(value, 1))
        is_empty = common is None or self._is_empty(common, _EMPTINESS_DEPTH - 1)
        return None if is_empty else common

    # Schemas

    def _schema(self, schema: Mapping[str, Json], path: str) -> NormalForm:
        sets: dict[str, Set] = {
            "number": numbers_of(schema, path),
            "string": strings_of(schema, path),
            "array": self._arrays(schema, path),
            "object": self._objects(schema, path),
        }
        forms = [assertion_form(schema, sets)]
        for keyword in schema:
            forms += self._keyword(keyword, schema, path)
        return self._intersection(forms, path)

    def _keyword(self, keyword: str, schema: Mapping[str, Any], path: str) -> list[NormalForm]:
        value, holds, fails = schema[keyword], self._literals.holds, self._literals.fails
        match keyword:
            case "$ref":
                return [self._form(holds(self._literals.references.target(schema)))]
            case "const":
                return [self._constant(value)]
            case "enum":
                return [union(*map(self._constant, array_of(value, f"{path}.enum")))]
            case "allOf":
                return [self._form(holds(part)) for part in array_of(value, f"{path}.allOf")]
            case "anyOf":
                parts = array_of(value, f"{path}.anyOf")
                return [union(*(self._form(holds(part)) for part in parts))]
            case "oneOf":
                return [self._one_of(array_of(value, f"{path}.oneOf"), path)]
            case "not":
                return [self._form(fails(value))]
            case "if" if "then" in schema or "else" in schema:
                then = both(holds(value), holds(schema.get("then", True)))
                otherwise = both(fails(value), holds(schema.get("else", True)))
                return [union(self._form(then), self._form(otherwise))]
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                pairs = object_of(value, f"{path}.{keyword}").items()
                return [union(*self._dependent(name, needs)) for name, needs in pairs]
        return []

    def _one_of(self, parts: Sequence[Json], path: str) -> NormalForm:
        holds = [self._literals.holds(part) for part in parts]
        fails = [self._literals.fails(part) for part in parts]
        forms = []
        for index, one in enumerate(holds):
            others = [
                self._form(fails[at])
                for at, other in enumerate(holds)
                if at != index and not self.is_unsatisfiable(both(one, other))
            ]
            forms.append(self._intersection([self._form(one), *others], f"{path}.oneOf"))
        return union(*forms)

    def _dependent(self, name: str, needs: Json) -> list[NormalForm]:
        """Return the forms of both cases of an entry of "dependencies"."""
        absent = {**EVERYTHING, "object": [ObjectSet(((name, NEVER),))]}
        if isinstance(needs, list):
            required = ObjectSet(required=frozenset([name, *map(str, needs)]))
            return [absent, {**union(), "object": [required]}]
        present = {**union(), "object": [ObjectSet(required=frozenset([name]))]}
        needed = self._form(self._literals.holds(needs))
        return [absent, self._intersection([present, needed], "$")]

    def _constant(self, value: Json) -> NormalForm:
        form = union()
        if value is None or isinstance(value, bool):
            return form | {"null" if value is None else "boolean": [frozenset([value])]}
        if (number := number_of(value)) is not None:
            return form | {"number": [NumberSet(frozenset([number]))]}
        if isinstance(value, str):
            return form | {"string": [StringSet(frozenset([value]))]}
        if isinstance(value, list):
            items = tuple(self._literals.holds({"const": item}) for item in value)
            return form | {"array": [ArraySet(items, NEVER, len(items), len(items))]}
        assert isinstance(value, Mapping)
        named = tuple((name, self._literals.holds({"const": one})) for name, one in value.items())
        members = ObjectSet(named, rest=NEVER, required=frozenset(value))
        return form | {"object": [members]}

    def _arrays(self, schema: Mapping[str, Any], path: str) -> ArraySet:
        prefix, rest = items_of(schema)
        contained = frozenset[Contained]()
        if "contains" in schema:
            fewest = count_of(schema, "minContains", path, 1)
            most = limit_of(schema, "maxContains", path)
            if fewest or most is not None:
                item = self._literals.holds(schema["contains"])
                fails = self._literals.fails(schema["contains"])
                contained = frozenset([Contained(item, (fails,), fewest=fewest, most=most)])
        return ArraySet(
            tuple(map(self._literals.holds, prefix)),
            self._literals.holds(rest),
            count_of(schema, "minItems", path),
            limit_of(schema, "maxItems", path),
            contained,
            schema.get("uniqueItems") is True,
        )

    def _objects(self, schema: Mapping[str, Any], path: str) -> ObjectSet:
        holds = self._literals.holds
        properties = object_of(schema.get("properties", {}), f"{path}.properties")
        matching = object_of(schema.get("patternProperties", {}), f"{path}.patternProperties")
        every = [holds(one) for pattern, one in matching.items() if _ANY.fullmatch(pattern)]
        rest = both(*every) if every else holds(schema.get("additionalProperties", True))
        patterns = tuple(
            (pattern, both(holds(one), *every))
            for pattern, one in matching.items()
            if not _ANY.fullmatch(pattern)
        )
        by_pattern = ObjectSet(patterns=patterns)
        required = schema.get("required")
        result = ObjectSet(
            tuple(
                (name, both(holds(one), by_pattern.value(name), *every))
                for name, one in properties.items()
            ),
            patterns,
            rest,
            frozenset(map(str, required)) if isinstance(required, list) else frozenset(),
            count_of(schema, "minProperties", path),
            limit_of(schema, "maxProperties", path),
        )
        if isinstance(required, list):  # keep the client's order
            others = dict.fromkeys(str(name) for name in required if name not in properties)
            named = (*result.named, *((name, result.value(name)) for name in others))
            result = replace(result, named=named)
        if "propertyNames" in schema:
            return self._with_names(result, schema["propertyNames"])
        return result

    def _with_names(self, objects: ObjectSet, names: Json) -> ObjectSet:
        """Restrict the names of members by "propertyNames"."""
        strings: Sequence[Any] = self._form(self._literals.holds(names))["string"]
        if list(strings) == [EVERY_STRING]:
            return objects
        named = {name: objects.value(name) for name, _ in objects.named}
        for name in (*named, *objects.required):
            one = StringSet(frozenset([name]))
            allowed = any(one.intersection(other) is not None for other in strings)
            named[name] = objects.value(name) if allowed else NEVER
        patterns: dict[str, Conjunction] = {}
        for one in strings:
            if one.values is not None and not (one.patterns | one.not_patterns | one.formats):
                for name in sorted(one.values):
                    named[name] = objects.value(name)
            else:
                pattern = one.pattern()
                if pattern is None:
                    where = self._literals.references.path_of(names)
                    raise GrammarError(
                        f'The keyword "propertyNames" can\'t be enforced at {where}.'
                    )
                patterns[pattern] = _value_by_pattern(objects, pattern)
        return ObjectSet(
            tuple(named.items()), tuple(patterns.items()), NEVER, objects.required,
            objects.low, objects.high,
        )  # fmt: skip

    # Negations

    def _negation(self, schema: Mapping[str, Json], path: str) -> NormalForm:
        if "$ref" in schema and self._ignores_siblings:
            return self._form(self._literals.fails(self._literals.references.target(schema)))
        members: dict[str, Sequence[Set]] = {
            "array": list(self._not_items(schema)),
            "object": list(self._not_properties(schema)),
        }
        forms = [negated_assertion_form(schema, path), {**union(), **members}]
        for keyword in schema:
            forms += self._not_keyword(keyword, schema, path)
        return self._intersection([union(*forms)], path)

    def _not_keyword(self, keyword: str, schema: Mapping[str, Any], path: str) -> list[NormalForm]:
        value, holds, fails = schema[keyword], self._literals.holds, self._literals.fails
        match keyword:
            case "$ref":
                return [self._form(fails(self._literals.references.target(schema)))]
            case "const":
                return [self._not_constant(value)]
            case "enum":
                return [self._intersection([self._not_constant(v) for v in value], path)]
            case "allOf":
                return [self._form(fails(part)) for part in value]
            case "anyOf":
                return [self._intersection([self._form(fails(part)) for part in value], path)]
            case "oneOf":
                none = self._intersection([self._form(fails(part)) for part in value], path)
                pairs = [
                    self._form(both(holds(one), holds(other)))
                    for index, one in enumerate(value)
                    for other in value[:index]
                ]
                return [none, *pairs]
            case "not":
                return [self._form(holds(value))]
            case "if" if "then" in schema or "else" in schema:
                then = both(holds(value), fails(schema.get("then", True)))
                otherwise = both(fails(value), fails(schema.get("else", True)))
                return [self._form(then), self._form(otherwise)]
            case "dependencies" | "dependentRequired" | "dependentSchemas":
                return [
                    form
                    for name, needs in object_of(value, f"{path}.{keyword}").items()
                    for form in self._not_dependent(name, needs)
                ]
        return []

    def _not_dependent(self, name: str, needs: Json) -> list[NormalForm]:
        present = ObjectSet(required=frozenset([name]))
        if isinstance(needs, list):
            missing = [present.without_member(str(need)) for need in needs]
            return [{**union(), "object": [one for one in missing if one is not None]}]
        failing = self._form(self._literals.fails(needs))
        return [self._intersection([{**union(), "object": [present]}, failing], "$")]

    def _not_constant(self, value: Json) -> NormalForm:
        if value is None or isinstance(value, bool):
            others = frozenset([None] if value is None else [False, True]) - {value}
            kind = "null" if value is None else "boolean"
            return EVERYTHING | {kind: [others] if others else []}
        if (number := number_of(value)) is not None:
            return EVERYTHING | {"number": [NumberSet(not_values=frozenset([number]))]}
        if isinstance(value, str):
            return EVERYTHING | {"string": [StringSet(not_values=frozenset([value]))]}
        if isinstance(value, list):
            parts = [{"const": item} for item in value]
            size = {"minItems": len(value), "maxItems": len(value)}
            schema: dict[str, Json] = {"type": "array", "items": parts, **size}
        else:
            assert isinstance(value, Mapping)
            members: Json = {name: {"const": one} for name, one in value.items()}
            schema = {"type": "object", "properties": members, "required": list(value),
                      "additionalProperties": False}  # fmt: skip
        return self._form(self._literals.fails(schema))

    def _not_items(self, schema: Mapping[str, Any]) -> Iterable[ArraySet]:
        holds, fails = self._literals.holds, self._literals.fails
        prefix, rest = items_of(schema)
        for index, item in enumerate(prefix):
            if fails(item) != NEVER:
                yield ArraySet((*(ALWAYS,) * index, fails(item)), low=index + 1)
        if fails(rest) == ALWAYS:
            yield ArraySet(low=len(prefix) + 1)
        elif fails(rest) != NEVER:
            other = Contained(fails(rest), (holds(rest),), start=len(prefix))
            yield ArraySet(contained=frozenset([other]))
        if "contains" in schema:
            fewest = count_of(schema, "minContains", "", 1)
            most = limit_of(schema, "maxContains", "")
            item, other_item = holds(schema["contains"]), (fails(schema["contains"]),)
            if fewest == 1:
                yield ArraySet(rest=other_item[0])
            elif fewest:
                fewer = Contained(item, other_item, fewest=0, most=fewest - 1)
                yield ArraySet(contained=frozenset([fewer]))
            if most is not None:
                yield ArraySet(contained=frozenset([Contained(item, other_item, fewest=most + 1)]))

    def _not_properties(self, schema: Mapping[str, Any]) -> Iterable[ObjectSet]:
        fails = self._literals.fails
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for name, one in properties.items():
            if fails(one) != NEVER:
                yield ObjectSet(((name, fails(one)),), required=frozenset([name]))
        for pattern, one in patterns.items():
            if fails(one) != NEVER:
                yield ObjectSet(witnesses=frozenset([Witness(fails(one), only_pattern=pattern)]))
        rest = fails(schema.get("additionalProperties", True))
        if rest != NEVER:
            other = Witness(rest, frozenset(properties), frozenset(patterns))
            yield ObjectSet(witnesses=frozenset([other]))
        if "propertyNames" in schema:
            key = fails(schema["propertyNames"])
            if key != NEVER:
                yield ObjectSet(witnesses=frozenset([Witness(ALWAYS, key=key)]))


def _value_by_pattern(objects: ObjectSet, names: str) -> Conjunction:
    """Return what all members must satisfy whose names match an expression."""
    matching = [(p, value) for p, value in objects.patterns if not are_disjoint(p, names)]
    is_covered = any(p in _ANYTHING and are_disjoint(names, _LINE_ENDS) for p, _ in matching)
    values = [value for _, value in matching]
    return both(*values) if is_covered else both(objects.rest, *values)
