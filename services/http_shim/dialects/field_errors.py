"""Sentences for fields of JSON bodies that msgspec refuses: what must stand there, and what does.

msgspec names Python's types and does not list the values of an enum. The sentences have JSON's
words and the values, which they take from the type of the field.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import grpc
import msgspec
from msgspec import inspect

from tokenwire.errors import ServiceError, invalid

__all__ = ["field_error", "kind_of", "kinds_of"]

_PLACE = re.compile(r"(?P<what>.*) - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]+)`")
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]+)`(?:, got `\w+`)?")
_BOUND = re.compile(
    r"Expected `(?P<kind>\w+)`(?P<of> of length)? (?P<bound><=|>=|<|>) (?P<number>\S+)"
)
_INVALID = re.compile(r"Invalid (?:enum )?value .*", re.DOTALL)
_STEP = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[(?P<index>\d+|\.\.\.)\]")
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
    "null": "null",
}
_UNITS = {"str": "characters", "array": "items", "object": "members"}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_DEEP = frozenset({"images", "messages", "structured_outputs", "system", "tools"})
"""Fields within which `param` is a path"""
_MOST_SHOWN = 60
"""Most characters of a value in a message"""
_ABSENT = object()


def field_error(message: str, body_type: type, body: Any, at: str = "") -> ServiceError:
    """Return INVALID_ARGUMENT with the sentence for a message of msgspec.

    body_type: type that `body` was converted to. at: path of `body` in the client's JSON.
    """
    place = _PLACE.fullmatch(message)
    path = place["path"] if place is not None else ""
    what = place["what"] if place is not None else message
    if (missing := _MISSING.fullmatch(what)) is not None:
        path = f"{path}.{missing['name']}" if path else missing["name"]
    name = _joined(at, path)
    sentence = _sentence(what, name or "The body", body_type, body, path)
    if not name:
        return ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID_BODY", sentence)
    field = re.split(r"[.\[]", name, maxsplit=1)[0]
    return invalid(name if at or field in _DEEP else field, sentence)


def kinds_of(names: str) -> str:
    """Return msgspec's names of kinds, as "int | null", in JSON's words."""
    kinds = [_KINDS.get(each, each) for each in names.split(" | ")]
    return _listed(list(dict.fromkeys(kinds)))


def kind_of(value: Any) -> str:
    """Return what a value is, in JSON's words; numbers, booleans and null as they are written."""
    match value:
        case None | bool() | int() | float():
            return _cut(msgspec.json.encode(value).decode())
        case str():
            return "a string"
        case list():
            return "an array"
    return "an object"


def _sentence(what: str, name: str, body_type: type, body: Any, path: str) -> str:
    """Return the sentence for a message without its place."""
    if _MISSING.fullmatch(what):
        return f"{name} is required."
    value = _value_at(body, path)
    expected, bound = _EXPECTED.fullmatch(what), _BOUND.fullmatch(what)
    is_choice = _INVALID.fullmatch(what) is not None
    if expected is not None or is_choice:
        choices, kinds = _choices(_types_at(body_type, body, path), path)
        if choices and (is_choice or not kinds):
            others = f", or {_listed(kinds)}" if kinds else ""
            return f"{name} must be one of {', '.join(choices)}{others}; got {_shown(value)}."
    got = "" if value is _ABSENT else f", got {kind_of(value)}"
    if expected is not None:
        return f"{name} must be {kinds_of(expected['kinds'])}{got}."
    if bound is not None:
        limit = f"{_BOUNDS[bound['bound']]} {bound['number'].removesuffix('.0')}"
        if not bound["of"]:
            return f"{name} must be {limit}{got}."
        got = "" if value is _ABSENT else f", got {len(value)}"
        return f"{name} must have {limit} {_UNITS[bound['kind']]}{got}."
    return f"{name}: {what[:1].lower()}{what[1:]}."


def _choices(types: Sequence[inspect.Type], path: str) -> tuple[Sequence[str], Sequence[str]]:
    """Return the values of an enum or a tag, and the kinds of what may stand there besides."""
    values: list[object] = []
    kinds: list[str] = []
    for each in types:
        match each:
            case inspect.LiteralType():
                values += each.values
            case inspect.NoneType():
                pass
            case inspect.StructType(tag=tag, tag_field=str(field)) if path.endswith(f".{field}"):
                values.append(tag)
            case inspect.StrType():
                kinds.append("a string")
            case inspect.ListType():
                kinds.append("an array")
            case inspect.StructType() | inspect.DictType():
                kinds.append("an object")
            case _:
                kinds.append("another value")
    return [repr(value) for value in dict.fromkeys(values)], list(dict.fromkeys(kinds))


def _types_at(body_type: type, body: Any, path: str) -> list[inspect.Type]:
    """Return the types that a path may lead to; those with a tag, for the path of a tag."""
    types, value = list(_flat(_type_info(body_type))), body
    for step in _STEP.finditer(path):
        name = step["name"]
        tagged = [each for each in types if isinstance(each, inspect.StructType)]
        if name is not None and any(each.tag_field == name for each in tagged):
            return [each for each in tagged if each.tag_field == name]
        types = [inner for each in types for inner in _inner(each, name, value)]
        value = _step_into(value, step)
    return types


def _inner(of: inspect.Type, name: str | None, value: Any) -> Iterator[inspect.Type]:
    """Yield the types of a member `name` of an object, or of the items of an array."""
    match of:
        case inspect.StructType() if name is not None and _has_tag(of, value):
            for field in of.fields:
                if field.encode_name == name:
                    yield from _flat(field.type)
        case inspect.ListType() | inspect.VarTupleType() if name is None:
            yield from _flat(of.item_type)
        case inspect.DictType():
            yield from _flat(of.value_type)


def _has_tag(struct: inspect.StructType, value: Any) -> bool:
    """Return whether an object has the tag of a type, or the type has none."""
    if struct.tag_field is None or not isinstance(value, dict):
        return True
    return bool(value.get(struct.tag_field) == struct.tag)


def _flat(of: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the types of a union, without what only documents them."""
    match of:
        case inspect.Metadata():
            yield from _flat(of.type)
        case inspect.UnionType():
            for each in of.types:
                yield from _flat(each)
        case _:
            yield of


@cache
def _type_info(of: type) -> inspect.Type:
    return inspect.type_info(of)


def _value_at(body: Any, path: str) -> Any:
    """Return the value at a path; _ABSENT where the path does not name one."""
    value = body
    for step in _STEP.finditer(path):
        value = _step_into(value, step)
    return value


def _step_into(value: Any, step: re.Match[str]) -> Any:
    name, index = step["name"], step["index"]
    if isinstance(value, dict) and name is not None:
        return value.get(name, _ABSENT)
    if isinstance(value, list) and index not in (None, "...") and int(index) < len(value):
        return value[int(index)]
    return _ABSENT


def _joined(at: str, path: str) -> str:
    return f"{at}.{path}" if at and path and not path.startswith("[") else at + path


def _listed(names: Sequence[str]) -> str:
    """Return "a", "a or b", or "a, b or c"."""
    return " or ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def _shown(value: Any) -> str:
    if value is _ABSENT:
        return "another value"
    return f"{_cut(value)!r}" if isinstance(value, str) else kind_of(value)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"
