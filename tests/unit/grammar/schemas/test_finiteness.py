"""A schema that only endless values satisfy is refused; every other recursion is allowed."""

from typing import Any

import pytest

from services.grammar import GrammarError
from services.grammar.schemas.validation import check

ME = {"$ref": "#"}
NODE = {"type": "object", "properties": {"next": ME}, "required": ["next"]}


@pytest.mark.parametrize(
    "schema",
    [
        NODE,
        ME,
        {"anyOf": [ME, {"allOf": [{}, ME]}]},
        {"type": "array", "items": ME, "minItems": 1},
        {"type": "array", "prefixItems": [{}, ME], "minItems": 2},
        {"$ref": "#/$defs/a", "$defs": {"a": {"oneOf": [{"$ref": "#/$defs/a"}]}}},
    ],
)
def test_endless_values_are_refused(schema: dict[str, Any]) -> None:
    """Otherwise a model writes until its tokens end."""
    with pytest.raises(GrammarError, match=r"No finite text satisfies the schema at \$:"):
        check(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"next": ME}},
        NODE | {"properties": {"next": {"anyOf": [ME, {"type": "null"}]}}},
        NODE | {"type": ["object", "null"]},
        {"type": "array", "items": ME},
        {"type": "array", "prefixItems": [{}, ME], "minItems": 1},
        {"enum": [1], "properties": {"a": ME}, "required": ["a"]},
    ],
)
def test_values_that_can_end_are_allowed(schema: dict[str, Any]) -> None:
    check(schema)
