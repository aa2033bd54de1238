"""Every keyword's value is checked, and no value ends the compile process."""

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.grammar import GrammarError
from services.grammar.compiling.compiler import Compiler
from services.grammar.schemas.validation import check
from tokenwire.pb.types.v1.types_pb2 import GrammarSpec
from tokenwire.serving.stack_layout import embedded_checkpoint

COUNT: tuple[Any, ...] = (-1, 1.5, "1", True, None, 2**64, [])
NUMBER: tuple[Any, ...] = ("1", True, None, [], {})
SCHEMAS: tuple[Any, ...] = (None, [], "a", 1)
WRONG: dict[str, tuple[Any, ...]] = {
    "$anchor": (1, None),
    "$id": (1, []),
    "$ref": (1, None, {}),
    "$schema": (1, True),
    "format": (1, []),
    "pattern": (1, None, {}),
    "type": (None, 7, "strin", [], ["string", "string"], ["string", 1], [["string"]], {}),
    "enum": (None, [], "a", {}, 1),
    "allOf": (None, [], {}, [1], [None]),
    "anyOf": (None, [], {}, [1]),
    "oneOf": (None, [], {}, [[]]),
    "prefixItems": (None, {}, [1]),
    "items": (None, 1, "a", [1]),
    **dict.fromkeys(
        ("additionalItems", "additionalProperties", "contains", "not", "propertyNames"),
        (None, 1, "a", []),
    ),
    **dict.fromkeys(("if", "then", "else"), (None, 1, "a", [])),
    "maximum": NUMBER,
    "minimum": NUMBER,
    "exclusiveMaximum": ("1", None, [], {}),
    "exclusiveMinimum": ("1", None, [], {}),
    "multipleOf": (*NUMBER, 0, -1),
    **dict.fromkeys(
        ("maxContains", "maxItems", "maxLength", "maxProperties", "minContains", "minItems",
         "minLength", "minProperties"), COUNT,
    ),
    "uniqueItems": (None, 1, "true"),
    "required": (None, True, "a", [1], ["a", None], {}),
    "dependentRequired": (None, [], {"a": None}, {"a": "b"}, {"a": [1]}),
    **dict.fromkeys(
        ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties",
         "properties"), (*SCHEMAS, {"a": 1}, {"a": None}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("keyword", WRONG)
def test_a_wrong_value_is_refused_with_its_path(keyword: str) -> None:
    for value in WRONG[keyword]:
        schema = {"properties": {"p": {"items": {keyword: value}}}}
        with pytest.raises(GrammarError, match=r"\$\.properties\.p\.items\b"):
            check(schema)


def test_keywords_in_values_are_data() -> None:
    data = {keyword: values[0] for keyword, values in WRONG.items()}
    check({"enum": [data], "default": data, "examples": [data]})
    check({"const": {"const": data}, "description": None})


NAMES = [*WRONG, "const", "default", "description", "id", "contentEncoding"]
VALUES: list[Any] = [
    None, True, False, 0, -1, 2, 1.5, -0.0, 1e300, 2**31 - 1, 2**53 + 1, 2**63, -(2**63), 2**64,
    "", "a", "\x00", "object", "#", "#/$defs/a", "http://x/y", "^(", [], [[]], [None], ["a"],
    ["a", 1], [{}], [{"type": "null"}], {}, {"a": None}, {"a": []}, {"a": ["b"]}, {"a": {}},
    {"(": {}}, {"type": 7}, {"$ref": "#"}, {"not": {}},
]  # fmt: skip
KEYWORDS = st.dictionaries(st.sampled_from(NAMES), st.sampled_from(VALUES), min_size=1, max_size=4)
PLACES = (
    lambda schema: schema,
    lambda schema: {"properties": {"p": schema}},
    lambda schema: {"not": schema},
    lambda schema: {"oneOf": [schema, {"type": "string"}]},
    lambda schema: {"allOf": [schema, {"type": "object"}]},
    lambda schema: {"$defs": {"a": schema}, "$ref": "#/$defs/a"},
)


async def refusals(schemas: list[dict[str, Any]]) -> list[str]:
    compiler = Compiler(embedded_checkpoint(), 5.0, 2)
    messages = []
    for schema in schemas:
        try:
            await compiler.try_out(GrammarSpec(json_schema=json.dumps(schema)))
        except GrammarError as error:
            messages.append(f"{schema}: {error}")
    await compiler.stop()
    return messages


@settings(max_examples=4)
@given(st.lists(st.builds(lambda place, one: place(one), st.sampled_from(PLACES), KEYWORDS),
                min_size=60, max_size=60))  # fmt: skip
def test_no_value_ends_the_compile_process(schemas: list[dict[str, Any]]) -> None:
    """Each schema compiles in a fork: one that ends by a signal is reported as too complex."""
    assert [message for message in asyncio.run(refusals(schemas)) if "too complex" in message] == []
