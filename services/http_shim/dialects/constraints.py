"""Fields of completions and chats that constrain the output, and their conversion to a grammar.

`response_format` is OpenAI's; the others are those of vLLM, SGLang and llama.cpp.
"""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, TypeAlias

from msgspec import Struct

from services.common.constraint_texts import (
    StructuralTagFormat,
    Texts,
    grammar_of_text,
    json_text,
    structural_tag_of,
)
from services.http_shim.dialects.fields import JsonObject, about
from services.http_shim.dialects.reading import Reading
from tokenwire.errors import invalid
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "ConstraintFields",
    "Grammar",
    "JsonObjectFormat",
    "JsonSchemaFormat",
    "JsonSchemaGrammar",
    "JsonSchemaSpec",
    "LarkGrammar",
    "LlguidanceGrammar",
    "RegexGrammar",
    "StructuralTagFormat",
    "StructuredOutputs",
    "read_constraint",
]

_Spec: TypeAlias = types_pb2.GrammarSpec
_WITH_JSON = frozenset({"json_schema", "json_object", "structural_tag", "lark", "llguidance"})


class TextFormat(Struct, tag_field="type", tag="text"):
    """`response_format`: free text."""


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    """`response_format`: any JSON object, or one that matches a schema."""

    schema: JsonObject | None = None


class JsonSchemaSpec(Struct):
    """`response_format.json_schema`; `name` and `strict` have no effect."""

    schema: JsonObject | None = None
    name: str | None = None
    strict: bool | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """`response_format`: JSON that matches a schema."""

    json_schema: JsonSchemaSpec | None = None


class RegexGrammar(Struct, tag_field="type", tag="regex"):
    """`grammar`: a regular expression."""

    value: str


class JsonSchemaGrammar(Struct, tag_field="type", tag="json_schema"):
    """`grammar`: a JSON Schema, as an object or as text."""

    value: str | JsonObject


class LarkGrammar(Struct, tag_field="type", tag="lark"):
    """`grammar`: a Lark grammar."""

    value: str


class LlguidanceGrammar(Struct, tag_field="type", tag="llguidance"):
    """`grammar`: llguidance's JSON, as an object or as text."""

    value: str | JsonObject


ResponseFormat: TypeAlias = TextFormat | JsonObjectFormat | JsonSchemaFormat | StructuralTagFormat
Grammar: TypeAlias = RegexGrammar | JsonSchemaGrammar | LarkGrammar | LlguidanceGrammar


class StructuredOutputs(Struct):
    """`structured_outputs` of vLLM: one constraint, and options."""

    json: str | JsonObject | None = None
    regex: str | None = None
    choice: Texts | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | StructuralTagFormat | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class ConstraintFields(Struct):
    """All fields with a constraint, of which a request gives one."""

    response_format: Annotated[
        ResponseFormat | None, about("Constrains the output, or parts of it, to JSON.")
    ] = None
    grammar: Annotated[
        Grammar | str | None, about("Constrains the output to a grammar; a string is GBNF or Lark.")
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None, about("A constraint in vLLM's form.")
    ] = None
    guided_json: Annotated[str | JsonObject | None, about("A JSON Schema, or its text.")] = None
    guided_regex: Annotated[str | None, about("A regular expression.")] = None
    guided_choice: Annotated[Texts | None, about("Texts, one of which is the output.")] = None
    guided_grammar: Annotated[str | None, about("A grammar in GBNF or Lark.")] = None
    guided_whitespace_pattern: Annotated[
        str | None,
        about(
            "Regular expression of the white space between tokens of JSON; empty = compact JSON."
        ),
    ] = None
    json_schema: Annotated[str | JsonObject | None, about("A JSON Schema, or its text.")] = None
    regex: Annotated[str | None, about("A regular expression.")] = None
    choice: Annotated[Texts | None, about("Texts, one of which is the output.")] = None
    ebnf: Annotated[str | None, about("A grammar in GBNF.")] = None
    structural_tag: Annotated[
        str | StructuralTagFormat | None,
        about("Free text in which triggers start constrained parts."),
    ] = None


def read_constraint(reading: Reading, body: ConstraintFields) -> None:
    """Read the grammar that a request asks for, if any.

    Raises INVALID_ARGUMENT, with the client's name of the field, for several constraints and for
    a constraint that the proto can't express.
    """
    given = list(_given(body))
    if len(given) > 1:
        (first, *_), (second, *_), *_ = given
        raise invalid(second, f"{first} and {second} exclude each other; give one constraint.")
    if not given:
        return
    [(name, value, make)] = given
    grammar = make(value, name)
    space, white_space = _white_space(body)
    kind = grammar.WhichOneof("spec")
    if white_space is not None and kind in _WITH_JSON:
        grammar.json_whitespace = white_space
    reading.request.grammar.CopyFrom(grammar)
    reading.note("grammar", name)
    reading.note("grammar.json_whitespace", space)
    reading.note_text(f"grammar.{kind}", _schema_name(name, value))


def _schema_name(name: str, value: Any) -> str:
    """Return the path of the schema, or of the grammar with schemas, in the request."""
    match value:
        case JsonSchemaFormat() if name == "response_format":
            return "response_format.json_schema.schema"
        case JsonObjectFormat() if name == "response_format":
            return "response_format.schema"
        case _ if name == "grammar":
            return "grammar.value"
    return name


def _given(body: ConstraintFields) -> Iterator[tuple[str, Any, Callable[[Any, str], _Spec]]]:
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


def _white_space(body: ConstraintFields) -> tuple[str, str | None]:
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
