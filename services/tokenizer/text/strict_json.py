"""Strict parsing of JSON that clients send."""

import json
from typing import Any, NoReturn

__all__ = ["parse_strictly"]


def parse_strictly(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for text that is not JSON, constants such as NaN, and half surrogate pairs,
    which UTF-8 can't encode; RecursionError if it is nested too deeply.
    """
    value = json.loads(text, parse_constant=_refuse_constant)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
