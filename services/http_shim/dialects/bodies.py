"""Decoding of JSON bodies: once to plain values, then to the types of a dialect.

The types check kinds, unions and integer widths. The tokenizer service checks ranges, for gRPC
clients too. `null` means absent everywhere.
"""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice
from typing import Any, TypeVar, get_args, get_type_hints

import grpc
import msgspec
from msgspec import Raw, Struct

from services.http_shim.dialects.field_errors import field_error, kind_of
from services.http_shim.dialects.fields import JsonObject, LeftOut
from tokenwire.errors import ServiceError, invalid

__all__ = ["Body", "body_of", "decoded", "nested_too_deeply"]

Body = TypeVar("Body", bound=Struct)
_EXACT_FLOATS = 2**53
"""Bound of the integers that a double holds exactly"""
_INDEX = re.compile(r"\[\d+\]")
_MAX_UNKNOWN = 1_000  # unknown fields that are collected
_MAX_STEPS = 8  # of the path of a number out of range: each reads the body again


def decoded(text: bytes) -> JsonObject:
    """Decode a body to plain values. Raises INVALID_ARGUMENT unless it is a JSON object."""
    try:
        value = msgspec.json.decode(text)
    except msgspec.ValidationError as error:
        what = str(error).partition(" - at ")[0]
        where = f"{what} - at `${_path_of_wrong_number(text)}`"
        raise field_error(where, dict, None) from None
    except UnicodeDecodeError:
        raise _malformed("it is not UTF-8") from None
    except RecursionError:
        raise nested_too_deeply() from None
    except msgspec.DecodeError as error:
        hint = " (or it has half of a surrogate pair)" if b"\\ud" in text.lower() else ""
        raise _malformed(str(error) + hint) from None
    if not isinstance(value, dict):
        raise field_error("Expected `object`", dict, value)
    return value


def body_of(kind: type[Body], fields: JsonObject) -> tuple[Body, list[str]]:
    """Return the body of a type, and the paths of its unknown fields.

    Of paths that differ only in indices, the first is returned. Raises INVALID_ARGUMENT with the
    field at fault: a top-level field, or a path within images, messages, tools or
    structured_outputs.
    """
    try:
        body = _converted(kind, fields)
    except msgspec.ValidationError as error:
        raise _wrong_bias(fields) or field_error(str(error), kind, fields) from None
    except RecursionError:
        raise nested_too_deeply() from None
    unknown: dict[str, str] = {}
    for path in islice(_unknown(body, fields), _MAX_UNKNOWN):
        unknown.setdefault(_INDEX.sub("[]", path), path)
    return body, list(unknown.values())


def _converted(kind: type[Body], fields: JsonObject) -> Body:
    """Convert a body. 4.0 and 1e1 are integers, as in JSON Schema, where an integer is expected."""
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error):
            raise
        return msgspec.convert(_folded(fields), kind, str_keys=True)


def _folded(value: Any) -> Any:
    """Return a value whose floats are integers where they can be."""
    match value:
        case float() if value.is_integer() and abs(value) < _EXACT_FLOATS:
            return int(value)
        case dict():
            return {name: _folded(each) for name, each in value.items()}
        case list():
            return [_folded(each) for each in value]
    return value


def _unknown(body: Struct, fields: JsonObject) -> Iterator[str]:
    """Yield the paths of unknown fields that are not null, except within arbitrary JSON."""
    known, parents = _fields_of(type(body))
    if not fields.keys() <= known:
        yield from (
            name for name, value in fields.items() if name not in known and value is not None
        )
    for name in parents:
        inner = getattr(body, name)
        if isinstance(inner, Struct):
            for path in _unknown(inner, fields[name]):
                yield f"{name}.{path}"
        elif isinstance(inner, list):
            for index, (item, value) in enumerate(zip(inner, fields[name], strict=True)):
                if isinstance(item, LeftOut):
                    yield f"{name}[{index}]"
                elif isinstance(item, Struct):  # else it is a text, where both are allowed
                    for path in _unknown(item, value):
                        yield f"{name}[{index}].{path}"


@cache
def _fields_of(of: type[Struct]) -> tuple[frozenset[str | None], Sequence[str]]:
    """Return the field names of a type with its tag, and the fields that may hold structs."""
    known = frozenset((*of.__struct_fields__, of.__struct_config__.tag_field))
    hints = get_type_hints(of)
    return known, [name for name in of.__struct_fields__ if _holds_structs(hints[name])]


def _holds_structs(kind: object) -> bool:
    is_struct = isinstance(kind, type) and issubclass(kind, Struct)
    return is_struct or any(map(_holds_structs, get_args(kind)))


def _path_of_wrong_number(text: bytes) -> str:
    """Return the path of the first number out of range; msgspec omits the names of fields."""
    path, value = "", Raw(text.lstrip())
    for _ in range(_MAX_STEPS):
        try:
            found = next(((step, each) for step, each in _members(value) if _is_wrong(each)), None)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            break  # what follows the number is malformed
        if found is None:
            break
        step, value = found
        path += step
    return path


def _members(value: Raw) -> Iterator[tuple[str, Raw]]:
    """Yield the members of an object or a list, each with its step of a path."""
    match bytes(memoryview(value)[:1]):
        case b"{":
            for name, each in msgspec.json.decode(value, type=dict[str, Raw]).items():
                yield f".{name}", each
        case b"[":
            for index, each in enumerate(msgspec.json.decode(value, type=list[Raw])):
                yield f"[{index}]", each


def _is_wrong(value: Raw) -> bool:
    try:
        msgspec.json.decode(value)
    except msgspec.ValidationError:
        return True
    return False


def _wrong_bias(fields: JsonObject) -> ServiceError | None:
    """Return the error of the first invalid entry of logit_bias; msgspec omits the key."""
    entries = fields.get("logit_bias")
    for key, bias in entries.items() if isinstance(entries, dict) else ():
        if not re.fullmatch(r"0|[1-9]\d{0,9}", key) or int(key) >= 2**32:
            return invalid(f"logit_bias.{key}", f"logit_bias.{key}: the key must be a token id.")
        if not isinstance(bias, int | float) or isinstance(bias, bool):
            what = f"must be a number, got {kind_of(bias)}"
            return invalid(f"logit_bias.{key}", f"logit_bias.{key} {what}.")
    return None


def nested_too_deeply() -> ServiceError:
    """Return the error of a body that can't be walked."""
    return _malformed("it is nested too deeply")


def _malformed(why: str) -> ServiceError:
    return ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT, "MALFORMED_JSON", f"The body can't be parsed: {why}."
    )
