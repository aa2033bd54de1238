"""Arguments of calls in a conversation: JSON of an object, or whatever a model wrote instead."""

import json

from services.common.json_values import Json, parse_json
from services.tokenizer.chat.answer.json_scanner import JsonScanner
from tokenwire.errors import ServiceError, invalid

__all__ = ["read_arguments", "repaired_arguments"]

_MAX_DEPTH = 64  # levels of JSON; templates write it by recursion
_MAX_REPAIRED = 64 * 1024  # characters: they are read one by one
_RAW = "text"


def read_arguments(text: str, field: str) -> dict[str, Json]:
    """Return the JSON object, {} for ""; raise INVALID_ARGUMENT on `field` for anything else."""
    if not text:
        return {}
    try:
        value = parse_json(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()  # half a surrogate pair is no text
        deep = _depth_exceeds(value, _MAX_DEPTH)
    except RecursionError:
        value, deep = {}, True
    except ValueError as error:
        raise invalid(field, f"This is not JSON: {error}.") from None
    if deep:
        raise invalid(field, "This JSON is nested too deeply.")
    if not isinstance(value, dict):
        raise invalid(field, "This must be a JSON object.")
    return value


def repaired_arguments(text: str) -> dict[str, Json]:
    """Return an object in place of a text that `read_arguments` refuses.

    The object has the members of the longest beginning of the text that closing quotes and brackets
    complete: a call that max_tokens cut keeps all but the name or the number it was cut in. Where
    no member is left, the text is no beginning of an object, or it has more than 65,536 characters,
    the object is {"text": text}; it is {} for whitespace.
    """
    if not text.strip():
        return {}
    try:
        value = read_arguments(_closed(text), "") if len(text) <= _MAX_REPAIRED else {}
    except ServiceError:
        value = {}
    return value or {_RAW: text}


def _closed(text: str) -> str:
    """The longest beginning that closing quotes and brackets make JSON, and those."""
    scanner, length = JsonScanner(), 0
    for place, character in enumerate(text, 1):
        if not scanner.push(character):
            break
        if scanner.is_closable:
            length = place
    scanner = JsonScanner()
    for character in text[:length]:
        scanner.push(character)
    return text[:length] + scanner.completion()


def _depth_exceeds(value: Json, depth: int) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list):
        return False
    return depth == 0 or any(_depth_exceeds(part, depth - 1) for part in value)
