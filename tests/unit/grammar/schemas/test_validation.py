"""A schema that can't be enforced in full is refused with the place, never enforced in part."""

import json

import pytest

from services.common.json_values import Json
from services.grammar import GrammarError
from services.grammar.schemas.validation import check, locate, parse

UNSUPPORTED = [
    "unevaluatedProperties", "unevaluatedItems", "$dynamicRef", "$recursiveRef", "extends",
    "disallow",
]  # fmt: skip


@pytest.mark.parametrize("keyword", UNSUPPORTED)
def test_unsupported_keyword_is_named_with_its_path(keyword: str) -> None:
    schema: Json = {"type": "object", "properties": {"a": {"items": [{"anyOf": [{keyword: {}}]}]}}}
    with pytest.raises(GrammarError) as caught:
        check(schema)
    assert f'"{keyword}" at $.properties.a.items[0].anyOf[0]' in str(caught.value)


def test_property_names_and_data_are_not_taken_for_keywords() -> None:
    check(
        {
            "properties": {
                "extends": {"type": "string"},
                "not": {"type": "string"},
                "x-guidance": True,
                "format": {},
            },
            "const": {"not": 1, "x-guidance": {}},
            "examples": [{"if": 1}],
            "required": ["contains"],
        }
    )


def test_llguidance_options_are_refused() -> None:
    with pytest.raises(GrammarError, match=r'"x-guidance" at \$\.\$defs\.a'):
        check({"$defs": {"a": {"x-guidance": {"lenient": True}}}})


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": ["string", "strin"]}, r'type at \$ must be .*"strin"'),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}}, r'"#/\$defs/b" at \$\.properties\.a\.\$ref'),
        ({"anyOf": [{}, 3]}, r"\$\.anyOf\[1\] must be an object or a boolean"),
        (False, "false, which no value satisfies"),
    ],
)
def test_other_faults_are_reported_with_their_path(schema: object, message: str) -> None:
    with pytest.raises(GrammarError, match=message):
        check(parse(json.dumps(schema)))


def test_references_resolve_through_escapes_and_arrays() -> None:
    check({"$defs": {"a/b": {"anyOf": [{}, {}]}}, "$ref": "#/$defs/a~1b/anyOf/1"})


DRAFT_04 = "http://json-schema.org/draft-04/schema#"
OLDER = [DRAFT_04, "http://json-schema.org/draft-06/schema", "http://json-schema.org/draft-07/schema#",
         "https://json-schema.org/draft/2019-09/schema"]  # fmt: skip
TUPLE: dict[str, Json] = {"type": "array", "prefixItems": [{"type": "integer"}]}


@pytest.mark.parametrize("draft", OLDER)
def test_a_keyword_of_a_later_draft_is_refused(draft: str) -> None:
    """llguidance would silently ignore it."""
    schema: Json = {"$schema": draft, "properties": {"a": TUPLE}}
    with pytest.raises(GrammarError, match=r'"prefixItems" at \$\.properties\.a; leave "\$schema"'):
        check(schema)
    constant: Json = {"$schema": draft, "anyOf": [{"const": 1}]}
    if draft == DRAFT_04:
        with pytest.raises(GrammarError, match=r'"const" at \$\.anyOf\[0\]'):
            check(constant)
    else:
        check(constant)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"a": {"$schema": DRAFT_04, "const": 1}}},
        {"properties": {"a": {"$schema": DRAFT_04, "$ref": "#/$defs/b"}}, "$defs": {"b": TUPLE}},
        {"$schema": DRAFT_04, "$ref": "#/components/a%2Fb", "components": {"a/b": TUPLE}},
        {"$schema": DRAFT_04, "$ref": "#/x/0", "x": [{"$ref": "#/y"}], "y": {"const": 1}},
    ],
)
def test_a_keyword_of_a_later_draft_is_found_behind_nesting_and_references(schema: Json) -> None:
    with pytest.raises(GrammarError, match="leave"):
        check(schema)


def test_keywords_of_the_named_draft_are_accepted() -> None:
    """In draft-07, an array under `items` means a tuple, as it does without "$schema"."""
    pair: Json = {"type": "array", "items": [{"type": "integer"}], "additionalItems": False}
    names: dict[str, Json] = {"properties": {"const": {"enum": [{"prefixItems": 1}]}}}
    names |= {"examples": [{"const": 1}]}
    for draft in OLDER:
        check({"$schema": draft, "definitions": {"a": pair}, "$ref": "#/definitions/a", **names})
    check({"$schema": "https://json-schema.org/draft/2020-12/schema#"} | TUPLE)
    check({"properties": {"$schema": {"const": DRAFT_04}, "a": TUPLE}})


def test_targets_of_references_are_checked_anywhere_in_the_document() -> None:
    parts: Json = {"a": [{}, {"items": {"extends": {}}}]}
    with pytest.raises(GrammarError, match=r'"extends" at \$\.components\.a\[1\]\.items'):
        check({"$ref": "#/components/a/1", "components": parts})


def test_cyclic_references_terminate() -> None:
    check({"items": {"$ref": "#/x/y"}, "x": {"y": {"items": {"$ref": "#/x/y"}, "$ref": "#/x/z"},
                                             "z": {"items": {"$ref": "#/items"}}}})  # fmt: skip


def test_syntax_errors_are_reported_with_line_and_column() -> None:
    with pytest.raises(GrammarError, match="line 2, column 2"):
        parse('{"type":\n nope}')
    with pytest.raises(GrammarError, match="NaN"):
        parse('{"minimum": NaN}')


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('\n{"title":\n "é", "minimum": 1e999} ', r"a number out of range \(line 3, column 18\)"),
        ('{"const": ' + "9" * 400 + "}", r"a number out of range \(line 1, column 11\)"),
        (
            '{"a\\"1e999": 1e99,\n"const": "x\\uD83D!"}',
            r"unpaired surrogate \(line 2, column 10\)",
        ),
    ],
)
def test_scalars_that_llguidance_refuses_are_reported_with_their_place(
    text: str, message: str
) -> None:
    with pytest.raises(GrammarError, match=message):
        parse(text)


def test_extreme_numbers_and_surrogate_pairs_are_accepted() -> None:
    parse(r'{"const": [1e308, -1.5E-400, "\uD83D\uDE00 1e999", true, false, null]}')


@pytest.mark.parametrize("text", ["[" * 100_000, '{"items":' * 200 + "{}" + "}" * 200])
def test_deep_nesting_is_refused(text: str) -> None:
    with pytest.raises(GrammarError, match="nested deeper"):
        check(parse(text))


def test_reasons_of_llguidance_get_a_path() -> None:
    schema: Json = {"properties": {"a": {"oneOf": [{}]}, "b": {"pattern": "(a"}}}
    assert "$.properties.a.oneOf" in locate(schema, "oneOf constraints are not supported")
    assert "$.properties.b.pattern" in locate(schema, "Unsatisfiable schema: Regex is empty: x")
    assert locate(schema, "schema too large") == "schema too large"


def test_a_number_of_thousands_of_digits_is_refused() -> None:
    with pytest.raises(GrammarError, match="too many digits"):
        parse('{"const":' + "9" * 5000 + "}")


@pytest.mark.parametrize("keyword", ["not", "if", "contains", "propertyNames", "then", "else"])
def test_subschemas_of_logical_keywords_are_checked(keyword: str) -> None:
    with pytest.raises(GrammarError, match=rf'"extends" at \$\.items\.{keyword}'):
        check({"items": {keyword: {"extends": {}}}})
    with pytest.raises(GrammarError, match=r'"extends" at \$\.dependencies\.a'):
        check({"dependencies": {"a": {"extends": {}}, "b": ["a"]}})


def test_keywords_that_need_duplicate_detection_are_refused_beside_other_text() -> None:
    """A chat with tools mixes JSON and text; duplicate detection needs JSON alone."""
    for text, message in (
        ('{"items":{"minProperties":2}}', r"minProperties at \$\.items can't be enforced beyond 1"),
        ('{"items":{"uniqueItems":true}}', r'"uniqueItems" at \$\.items'),
    ):
        check(parse(text))
        with pytest.raises(GrammarError, match=message):
            check(parse(text), is_followed=False)


def test_min_properties_is_accepted_in_closed_objects() -> None:
    closed = {"additionalProperties": False, "minProperties": 2}
    schema = {"properties": {"a": {}, "b": {}, "c": {}}, **closed}
    check(parse(json.dumps(schema)), is_followed=False)
