"""JSON values as Python objects."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

__all__ = ["Json", "JsonConstantError", "parse_json"]

Json: TypeAlias = "Mapping[str, Json] | Sequence[Json] | str | int | float | bool | None"


class JsonConstantError(ValueError):
    """The text has NaN or an infinity, which Python's parser accepts and JSON does not have."""


def parse_json(text: str, parse_float: Callable[[str], float] = float) -> Any:
    """Return the value of JSON text. Raises ValueError, and RecursionError for deep nesting."""
    return json.loads(text, parse_float=parse_float, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> NoReturn:
    raise JsonConstantError(f"{name} is not a JSON number")
