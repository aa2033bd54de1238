"""Strict parsing of JSON that clients send."""

import json
from typing import Any

from services.common.json_values import parse_json

__all__ = ["parse_strictly"]


def parse_strictly(text: str) -> Any:
    """Return the value of a JSON text.

    Raises ValueError for text that is not JSON, constants such as NaN, and half surrogate pairs,
    which UTF-8 can't encode; RecursionError if it is nested too deeply.
    """
    value = parse_json(text)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()
    return value
