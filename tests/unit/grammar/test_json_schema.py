"""A schema that can't be enforced in full is refused, with the place; never enforced in part."""

import json

import pytest

from services.grammar.error import GrammarError
from services.grammar.json_schema import check, locate, parse

UNSUPPORTED = [
    "not", "if", "then", "else", "contains", "minContains", "uniqueItems", "propertyNames",
    "dependentRequired", "dependentSchemas", "dependencies", "unevaluatedProperties",
    "unevaluatedItems", "$dynamicRef", "$recursiveRef",
]  # fmt: skip


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keyword_is_named_with_its_path(keyword: str) -> None:
    schema = {"type": "object", "properties": {"a": {"items": [{"anyOf": [{keyword: {}}]}]}}}
    with pytest.raises(GrammarError) as caught:
        check(schema)
    assert f'"{keyword}" at $.properties.a.items[0].anyOf[0]' in str(caught.value)


def test_names_of_properties_and_data_are_no_keywords() -> None:
    check(
        {
            "properties": {"not": {"type": "string"}, "x-guidance": True, "format": {}},
            "const": {"not": 1, "x-guidance": {}},
            "examples": [{"if": 1}],
            "required": ["contains"],
        }
    )


def test_the_compilers_options_are_not_the_clients() -> None:
    with pytest.raises(GrammarError, match=r'"x-guidance" at \$\.\$defs\.a'):
        check({"$defs": {"a": {"x-guidance": {"lenient": True}}}})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"items": {"format": "iri"}}, r"iri.* at \$\.items\.format"),
        ({"type": ["string", "strin"]}, r'"strin" at \$\.type'),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, r'"#/\$defs/b" at \$\.properties\.a\.\$ref'),
        ({"anyOf": [{}, 3]}, r"\$\.anyOf\[1\] must be an object or a boolean"),
        (False, "false, which nothing can satisfy"),
    ],
)
def test_other_faults_come_with_their_path(schema: object, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        check(parse(json.dumps(schema)))


def test_references_resolve_through_escapes_and_arrays() -> None:
    check({"$defs": {"a/b": {"anyOf": [{}, {}]}}, "$ref": "#/$defs/a~1b/anyOf/1"})


def test_syntax_errors_come_with_line_and_column() -> None:
    with pytest.raises(GrammarError, match="line 2, column 2"):
        parse('{"type":\n nope}')
    with pytest.raises(GrammarError, match="NaN"):
        parse('{"minimum": NaN}')


@pytest.mark.parametrize("text", ["[" * 100_000, '{"items":' * 200 + "{}" + "}" * 200])
def test_bottomless_nesting_is_refused(text: str) -> None:
    with pytest.raises(GrammarError, match="nested deeper"):
        check(parse(text))


def test_a_reason_without_a_place_gets_one() -> None:
    schema = {"properties": {"a": {"oneOf": [{}]}, "b": {"pattern": "(a"}}}
    assert "$.properties.a.oneOf" in locate(schema, "oneOf constraints are not supported")
    assert "$.properties.b.pattern" in locate(schema, "regex parse error: unclosed group")
    assert locate(schema, "schema too large") == "schema too large"
