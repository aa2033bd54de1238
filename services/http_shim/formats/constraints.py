"""Conversion of the constraint fields to a grammar."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import msgspec

from services.common.constraint_texts import (
    JsonObject,
    StructuralTagFormat,
    grammar_of_text,
    structural_tag_of,
)
from services.http_shim.formats.constraint_fields import StructuredOutputs
from services.http_shim.formats.request_bodies import (
    GenerationBody,
    Grammar,
    JsonObjectFormat,
    JsonSchemaFormat,
    JsonSchemaGrammar,
    LarkGrammar,
    LlguidanceGrammar,
    RegexGrammar,
)
from tokenwire.errors import invalid
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "constraint_of",
    "constraint_param",
    "json_text",
    "schema_location",
    "white_space_param",
]

_Spec: TypeAlias = types_pb2.GrammarSpec

_WITH_JSON = frozenset({"json_schema", "json_object", "structural_tag", "lark", "llguidance"})


def constraint_of(body: GenerationBody) -> _Spec | None:
    """Return the grammar that a request asks for; None for free text.

    Raises INVALID_ARGUMENT, with the client's name of the field, for several constraints and for
    a constraint that the proto can't express.
    """
    given = list(_given(body))
    if len(given) > 1:
        (first, *_), (second, *_), *_ = given
        raise invalid(second, f"{first} and {second} exclude each other; give one constraint.")
    if not given:
        return None
    [(name, value, make)] = given
    grammar = make(value, name)
    _, white_space = _white_space(body)
    if white_space is not None and grammar.WhichOneof("spec") in _WITH_JSON:
        grammar.json_whitespace = white_space
    return grammar


def constraint_param(body: GenerationBody) -> str:
    """Return the name of the field that constrains the output."""
    return next((name for name, *_ in _given(body)), "grammar")


def white_space_param(body: GenerationBody) -> str:
    """Return the name of the field that sets the white space in JSON."""
    return _white_space(body)[0]


def schema_location(body: GenerationBody) -> str:
    """Return the path of the schema, or of the grammar with schemas, in the request."""
    name = constraint_param(body)
    match name, body.response_format:
        case "response_format", JsonSchemaFormat():
            return "response_format.json_schema.schema"
        case "response_format", JsonObjectFormat():
            return "response_format.schema"
        case "grammar", _:
            return "grammar.value"
    return name


def json_text(value: str | JsonObject) -> str:
    """Return JSON as the text that the client wrote."""
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _given(body: GenerationBody) -> Iterator[tuple[str, Any, Callable[[Any, str], _Spec]]]:
    """Yield the name of each given field, its value, and the function that makes the grammar."""
    if isinstance(body.response_format, JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat):
        yield "response_format", body.response_format, _of_response_format
    if body.grammar:
        yield "grammar", body.grammar, _of_grammar
    outputs = body.structured_outputs or StructuredOutputs()
    if outputs.disable_additional_properties:
        raise invalid(
            "structured_outputs.disable_additional_properties",
            "disable_additional_properties is not supported; use "
            '"additionalProperties": false in the schema.',
        )
    if outputs.json_object:
        yield "structured_outputs.json_object", JsonObjectFormat(), _of_response_format
    for name, value, make in (
        ("structured_outputs.json", outputs.json, _of_json),
        ("structured_outputs.regex", outputs.regex, _of_regex),
        ("structured_outputs.choice", outputs.choice, _of_choice),
        ("structured_outputs.grammar", outputs.grammar, _of_text),
        ("structured_outputs.structural_tag", outputs.structural_tag, structural_tag_of),
        ("guided_json", body.guided_json, _of_json),
        ("guided_regex", body.guided_regex, _of_regex),
        ("guided_choice", body.guided_choice, _of_choice),
        ("guided_grammar", body.guided_grammar, _of_text),
        ("json_schema", body.json_schema, _of_json),
        ("regex", body.regex, _of_regex),
        ("choice", body.choice, _of_choice),
        ("ebnf", body.ebnf, _of_ebnf),
        ("structural_tag", body.structural_tag, structural_tag_of),
    ):
        if value is not None:
            yield name, value, make


def _white_space(body: GenerationBody) -> tuple[str, str | None]:
    """Return the field with the pattern of white space in JSON, and the pattern if any."""
    outputs = body.structured_outputs or StructuredOutputs()
    if outputs.disable_any_whitespace:
        return "structured_outputs.disable_any_whitespace", ""
    if outputs.whitespace_pattern is not None:
        return "structured_outputs.whitespace_pattern", outputs.whitespace_pattern
    return "guided_whitespace_pattern", body.guided_whitespace_pattern


def _of_response_format(
    form: JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat, name: str
) -> _Spec:
    if isinstance(form, JsonSchemaFormat):
        if form.json_schema is None or form.json_schema.schema is None:
            raise invalid(name, "response_format.json_schema.schema is required.")
        return _Spec(json_schema=json_text(form.json_schema.schema))
    if isinstance(form, StructuralTagFormat):
        return structural_tag_of(form, name)
    if form.schema is not None:
        return _Spec(json_schema=json_text(form.schema))
    return _Spec(json_object=types_pb2.JsonObject())


def _of_grammar(grammar: Grammar | str, name: str) -> _Spec:
    match grammar:
        case RegexGrammar():
            return _Spec(regex=grammar.value)
        case JsonSchemaGrammar():
            return _Spec(json_schema=json_text(grammar.value))
        case LarkGrammar():
            return _Spec(lark=grammar.value)
        case LlguidanceGrammar():
            return _Spec(llguidance=json_text(grammar.value))
    return grammar_of_text(grammar)


def _of_text(value: str, _: str) -> _Spec:
    return grammar_of_text(value)


def _of_ebnf(value: str, _: str) -> _Spec:
    return _Spec(gbnf=value)


def _of_json(value: str | JsonObject, _: str) -> _Spec:
    return _Spec(json_schema=json_text(value))


def _of_regex(value: str, _: str) -> _Spec:
    return _Spec(regex=value)


def _of_choice(value: list[str], _: str) -> _Spec:
    return _Spec(choice=types_pb2.ChoiceList(choices=value))
