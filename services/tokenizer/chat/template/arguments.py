"""Arguments of tool calls and templates: JSON objects, and repair of text that was cut."""

from services.common.json_values import Json
from services.tokenizer.chat.answer.json_scanner import JsonScanner
from services.tokenizer.text.strict_json import parse_strictly
from tokenwire.errors import ServiceError, invalid

__all__ = ["lenient_arguments", "read_arguments", "repaired_arguments"]

_MAX_DEPTH = 64  # levels of JSON, which templates write recursively
_MAX_REPAIRED = 64 * 1024  # characters, which the scanner reads one by one
_RAW = "text"


def read_arguments(text: str, field: str) -> dict[str, Json]:
    """Return the JSON object, {} for ""; raise INVALID_ARGUMENT on `field` for anything else."""
    if not text:
        return {}
    try:
        value = parse_strictly(text)
        deep = _depth_exceeds(value, _MAX_DEPTH)
    except RecursionError:
        value, deep = {}, True
    except ValueError as error:
        raise invalid(field, f"{field} is not JSON: {error}.") from None
    if deep:
        raise invalid(field, f"{field} is nested too deeply.")
    if not isinstance(value, dict):
        raise invalid(field, f"{field} must be a JSON object.")
    return value


def lenient_arguments(text: str) -> dict[str, Json]:
    """Return the JSON object, or what `repaired_arguments` makes of any other text."""
    try:
        return read_arguments(text, "")
    except ServiceError:
        return repaired_arguments(text)


def repaired_arguments(text: str) -> dict[str, Json]:
    """Return an object in place of a text that `read_arguments` refuses.

    The object is the longest beginning of the text that closing quotes and brackets complete. So a
    call that max_tokens cut loses at most the name or number at its end. If that object has no
    members, or the text has more than 65,536 characters, the result is {"text": text}. For
    whitespace it is {}.
    """
    if not text.strip():
        return {}
    try:
        value = read_arguments(_closed(text), "") if len(text) <= _MAX_REPAIRED else {}
    except ServiceError:
        value = {}
    return value or {_RAW: text}


def _closed(text: str) -> str:
    """Return the longest beginning that closing quotes and brackets complete, with them."""
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
