"""Rules of argument values in the notations of tool calls."""

from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple

from services.common.annotations import ENCODINGS, ENFORCED_FORMATS
from services.tokenizer.chat.answer.argument_schemas import (
    json_types,
    named_values,
    object_of,
    properties_of,
)
from services.tokenizer.chat.answer.call_parts import as_json
from services.tokenizer.chat.answer.call_syntax import (
    KEY,
    KIND,
    KeywordArguments,
    Notation,
    TaggedArguments,
)
from services.tokenizer.chat.answer.grammar_rules import GrammarRules, chosen, literal
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["ANNOTATIONS", "Parameter", "keyword_value", "tagged_value"]

# keywords of JSON Schema that constrain nothing
ANNOTATIONS = ENCODINGS | {
    "$comment", "$id", "$schema", "default", "deprecated", "description", "examples", "readOnly",
    "title", "writeOnly",
}  # fmt: skip
_MAX_DEPTH = 6  # levels of values that are not JSON; a form of calls rarely shows more
_PYTHON_STRING = r"/'([^'\\\n]|\\.)*'/"
_BARE_STRINGS = "This model writes strings without quotes, so they can't be constrained by"
_OWN_NOTATION = "This model does not write these values as JSON, so they can't be constrained by"
_STRUCTURE = frozenset({
    "$defs", "$ref", "additionalProperties", "anyOf", "items", "oneOf", "properties", "required",
    "type",
})  # fmt: skip


class Parameter(NamedTuple):
    """A parameter of a tool."""

    tool: completion_pb2.Tool
    name: str
    schema: Mapping[str, Any]
    place: str
    """Field of the request with the tool's schema"""


def keyword_value(
    grammar: GrammarRules, name: str, parameter: Parameter, form: KeywordArguments
) -> str:
    """Return the rule of a value in brackets."""
    if form.notation is Notation.PYTHON:
        return _json_or_python(grammar, name, parameter)
    return _BareValues(grammar, name, parameter, form.quote).body(parameter.schema, 0)


def tagged_value(
    grammar: GrammarRules, name: str, parameter: Parameter, form: TaggedArguments
) -> str:
    """Return the rule of the text behind a parameter's name: a mark, the value, and a mark."""
    ends = form.ends.replace(KEY, parameter.name)
    end = grammar.mark(ends)
    kinds = json_types(parameter.schema, parameter.schema)
    bodies: list[str] = []
    if others := sorted(kinds - {"string"}):
        schema = _of_types(parameter.schema, others)
        own = parameter._replace(schema=schema)
        if form.notation is Notation.TAGS:
            value = _TaggedValues(grammar, name, own, form).body(schema, 0)
        elif form.notation is Notation.PYTHON:
            value = _json_or_python(grammar, name, own)
        else:
            value = grammar.schema(name, schema, parameter.place)
        marks = dict.fromkeys(
            form.middle.replace(KIND, form.kinds.get(kind, "")) for kind in others
        )
        begins = " | ".join(map(grammar.mark, marks))
        bodies.append(f"({begins}) {value} {end}")
    if "string" in kinds:
        begin = grammar.mark(form.middle.replace(KIND, form.kinds.get("string", "")))
        bodies.append(f"{begin} {_text(grammar, parameter, ends)}")
    return f"({' | '.join(bodies)})" if len(bodies) > 1 else bodies[0]


def _of_types(schema: Mapping[str, Any], kinds: Sequence[str]) -> Mapping[str, Any]:
    """Return the schema without the type of strings, which have their own rule."""
    named = schema.get("type")
    if isinstance(named, list) and "string" in named:
        return {**schema, "type": list(kinds)}
    values = named_values(schema)
    if any(isinstance(value, str) for value in values):
        return {**schema, "enum": [value for value in values if not isinstance(value, str)]}
    for keyword in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(keyword), list):
            kept = [option for option in options if json_types(option, schema) != {"string"}]
            return {**schema, keyword: kept}
    return schema


def _text(grammar: GrammarRules, parameter: Parameter, ends: str) -> str:
    """Return the rule of a bare string and the mark behind it."""
    schema = parameter.schema
    values = [value for value in named_values(schema) if isinstance(value, str)]
    if values:
        return f"({' | '.join(map(literal, values))}) {grammar.mark(ends)}"
    _leave_out(
        grammar, parameter, schema.keys() - {"type", "anyOf", "oneOf", "$ref"}, _BARE_STRINGS
    )
    return _through(grammar, ends)


def _leave_out(grammar: GrammarRules, parameter: Parameter, found: Any, why: str) -> None:
    unknown = set(found) - ANNOTATIONS - {"$defs"}
    kind = parameter.schema.get("format")
    if isinstance(kind, str) and kind not in ENFORCED_FORMATS:
        unknown.discard("format")
    path = f"{parameter.place}.properties.{parameter.name}"
    grammar.leave_out(unknown, parameter.tool, parameter.place, path, why)


def _through(grammar: GrammarRules, mark: str) -> str:
    """Return the rule of any text that ends with a mark. All uses share one rule."""
    return grammar.shared_through("string", mark)


def _json_or_python(grammar: GrammarRules, name: str, parameter: Parameter) -> str:
    """Return the rule of JSON by the schema, or of Python's spelling of it where it is plain."""
    json_rule = grammar.schema(name, parameter.schema, parameter.place)
    python = _python(grammar, f"{name}_python", parameter.schema, parameter.schema, 0)
    return f"({json_rule} | {python})" if python else json_rule


def _python(
    grammar: GrammarRules, name: str, schema: Any, root: Mapping[str, Any], depth: int
) -> str:
    """Return the body of Python's literals that differ from JSON; "" if the schema is not plain."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ""
    if values := named_values(schema):
        plain = (value for value in values if isinstance(value, str | bool | NoneType))
        written = map(repr, plain)  # numbers are those of JSON
        return _any_of([literal(value) for value in written])
    if schema.keys() - ANNOTATIONS - _STRUCTURE - {"minimum", "maximum"}:
        return ""
    bodies: list[str] = []
    for kind in sorted(json_types(schema, root)):
        if kind == "string":
            bodies.append(_PYTHON_STRING)
        elif kind == "boolean":
            bodies.append('"True" | "False"')
        elif kind == "null":
            bodies.append('"None"')
        elif kind == "array":
            item = schema.get("items")
            body = _python_or_number(grammar, f"{name}_i", item, root, depth + 1)
            if body:
                bodies.append(f'"[" ({body} (", " {body})*)? "]"')
        elif kind == "object":
            bodies += _python_object(grammar, name, schema, root, depth)
    return _any_of(bodies)


def _any_of(bodies: Sequence[str]) -> str:
    return f"({' | '.join(bodies)})" if bodies else ""


def _python_object(
    grammar: GrammarRules, name: str, schema: Mapping[str, Any], root: Mapping[str, Any], depth: int
) -> list[str]:
    required = object_of(schema).get("required") or []
    members: list[tuple[str, bool]] = []
    for key, own in properties_of(schema).items():
        rule = f"{name}_{len(members)}"
        body = _python_or_number(grammar, rule, own, root, depth + 1)
        if not body:
            return []
        members.append((f"{literal(repr(key) + ': ')} {body}", key in required))
    listed = chosen(grammar, f"{name}_o", members, literal(", "))
    return [f'"{{" {listed} "}}"'] if members else []


def _python_or_number(
    grammar: GrammarRules, name: str, schema: Any, root: Mapping[str, Any], depth: int
) -> str:
    """Return the body of Python's literals, with numbers, which are those of JSON."""
    if not isinstance(schema, Mapping) or "$ref" in schema:
        return ""
    body = _python(grammar, name, schema, root, depth)
    kinds = json_types(schema, root) & {"integer", "number"}
    if kinds and not named_values(schema):
        numbers = grammar.schema(name, {**schema, "type": sorted(kinds)}, "tools")
        return f"({body} | {numbers})" if body else numbers
    return body


class _OwnValues:
    """Rules of the values of a schema in a notation other than JSON."""

    def __init__(self, grammar: GrammarRules, name: str, parameter: Parameter) -> None:
        self._grammar = grammar
        self._name = name
        self._parameter = parameter
        self._count = 0

    def body(self, schema: Any, depth: int) -> str:
        """Return the body of any value that the schema allows, as far as rules can express it."""
        own = schema if isinstance(schema, Mapping) else {}
        root = self._parameter.schema
        if values := named_values(own):
            return f"({' | '.join(self.written(value) for value in values)})"
        unknown = own.keys() - _STRUCTURE
        bodies: list[str] = []
        for kind in sorted(json_types(own, root)):
            if kind in ("integer", "number", "boolean", "null"):
                unknown = unknown - {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum",
                                     "multipleOf"}  # fmt: skip
                scalar = {key: own[key] for key in own if key not in _STRUCTURE} | {"type": kind}
                bodies.append(self._grammar.schema(self.new_name(), scalar, self._parameter.place))
            elif kind == "array" and depth < _MAX_DEPTH:
                bodies.append(self.array(self.body(own.get("items"), depth + 1)))
            elif kind == "object" and depth < _MAX_DEPTH:
                bodies.append(self._members(own, depth))
            else:
                bodies.append(self.string())
        _leave_out(self._grammar, self._parameter, unknown, _OWN_NOTATION)
        return f"({' | '.join(dict.fromkeys(bodies))})"

    def _members(self, schema: Mapping[str, Any], depth: int) -> str:
        required = object_of(schema).get("required") or []
        members = [
            (self.member(key, self.body(own, depth + 1)), key in required)
            for key, own in properties_of(schema).items()
        ]
        return self.object(members)

    def new_name(self) -> str:
        self._count += 1
        return f"{self._name}_{self._count}"

    def written(self, value: Any) -> str:
        """Return the body of one value."""
        raise NotImplementedError

    def string(self) -> str:
        """Return the body of any string."""
        raise NotImplementedError

    def array(self, item: str) -> str:
        """Return the body of a list."""
        raise NotImplementedError

    def member(self, key: str, value: str) -> str:
        """Return the body of a member of an object."""
        raise NotImplementedError

    def object(self, members: Sequence[tuple[str, bool]]) -> str:
        """Return the body of an object."""
        raise NotImplementedError


class _BareValues(_OwnValues):
    """Values of Gemma: {key:"text",other:[1]} with a mark in place of quotes."""

    def __init__(self, grammar: GrammarRules, name: str, parameter: Parameter, quote: str) -> None:
        super().__init__(grammar, name, parameter)
        self._quote = quote

    def written(self, value: Any) -> str:
        if isinstance(value, str):
            return self._grammar.mark(f"{self._quote}{value}{self._quote}")
        return literal(as_json(value))

    def string(self) -> str:
        return f"{self._grammar.mark(self._quote)} {_through(self._grammar, self._quote)}"

    def array(self, item: str) -> str:
        return f'"[" ({item} ("," {item})*)? "]"'

    def member(self, key: str, value: str) -> str:
        return f"{literal(key + ':')} {value}"

    def object(self, members: Sequence[tuple[str, bool]]) -> str:
        listed = chosen(self._grammar, self.new_name(), members, '","') if members else ""
        return f'"{{" {listed} "}}"'


class _TaggedValues(_OwnValues):
    """Values of MiniMax M3: a tag for each item and member."""

    def __init__(
        self, grammar: GrammarRules, name: str, parameter: Parameter, form: TaggedArguments
    ) -> None:
        super().__init__(grammar, name, parameter)
        self._form = form

    def written(self, value: Any) -> str:
        return literal(value if isinstance(value, str) else as_json(value))

    def string(self) -> str:
        return self._grammar.shared_text("plain", self._form.begins)

    def array(self, item: str) -> str:
        return f"({self.member(self._form.item, item)})*"

    def member(self, key: str, value: str) -> str:
        form, mark = self._form, self._grammar.mark
        begin, end = f"{form.begins}{key}{form.middle}", form.ends.replace(KEY, key)
        return f"{mark(begin)} {value} {mark(end)}"

    def object(self, members: Sequence[tuple[str, bool]]) -> str:
        return chosen(self._grammar, self.new_name(), members, "") if members else ""
