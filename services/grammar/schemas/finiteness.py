"""Schemas that only endless values satisfy, such as an object that requires itself as a member."""

from collections.abc import Mapping, Sequence
from typing import Any

from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.schemas.subschemas import resolve_pointer

__all__ = ["check_finite"]


def check_finite(schema: Json, found: Sequence[tuple[Mapping[str, Json], str]]) -> None:
    """Raise GrammarError if no finite value satisfies a schema; `found` has all its subschemas.

    A model would write such a value until its tokens end. This looks at references, members that
    are required and items, and takes all other keywords to be satisfiable.
    """
    finite: set[int] = set()
    grows = True
    while grows:
        before = len(finite)
        # parents come first: in reverse, one pass decides most schemas
        finite.update(id(one) for one, _ in reversed(found) if _is_finite(one, schema, finite))
        grows = len(finite) > before
    if isinstance(schema, Mapping) and id(schema) not in finite:
        raise GrammarError(
            f"No finite text satisfies the schema at {found[0][1]}: it requires itself without end."
        )


def _is_finite(schema: Mapping[str, Any], root: Json, finite: set[int]) -> bool:
    def known(value: Json) -> bool:
        return not isinstance(value, Mapping) or id(value) in finite

    reference = schema.get("$ref")
    if isinstance(reference, str) and (reference == "#" or reference.startswith("#/")):
        target = resolve_pointer(root, reference[1:])
        return target is None or known(target[0])
    for keyword, enough in (("allOf", all), ("anyOf", any), ("oneOf", any)):
        parts = schema.get(keyword)
        if isinstance(parts, list) and parts and not enough(map(known, parts)):
            return False
    if "enum" in schema or "const" in schema:
        return True
    if schema.get("type") == "object":
        properties, required = schema.get("properties"), schema.get("required")
        if isinstance(properties, Mapping) and isinstance(required, list):
            needed = (properties.get(name) for name in required if isinstance(name, str))
            return all(map(known, needed))
    if schema.get("type") == "array" and isinstance(least := schema.get("minItems"), int):
        return all(map(known, _first_items(schema, least)))
    return True


def _first_items(schema: Mapping[str, Any], count: int) -> list[Json]:
    prefix, rest = schema.get("prefixItems", ()), schema.get("items", True)
    if isinstance(rest, list):
        prefix, rest = rest, schema.get("additionalItems", True)
    items = prefix if isinstance(prefix, list) else ()
    return [*items, rest][: max(count, 0)]  # all items behind the prefix have one schema
