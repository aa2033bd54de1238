"""Output of the commands: results on stdout, errors on stderr."""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from tokenwire.cli.visible_text import visible

__all__ = ["JsonObject", "JsonValue", "discard_output", "print_error", "print_json", "print_text"]

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)
JsonObject: TypeAlias = Mapping[str, JsonValue]


def print_json(value: JsonObject) -> None:
    """Print one JSON object on a line of its own."""
    print(json.dumps(value, ensure_ascii=False), flush=True)


def print_text(text: str, end: str = "\n") -> None:
    """Print text of a model at once; on a terminal without sequences that this would obey."""
    print(visible(text) if sys.stdout.isatty() else text, end=end, flush=True)


def print_error(message: str) -> None:
    """Print a sentence on stderr."""
    print(f"tokenwire: {message}", file=sys.stderr)


def discard_output() -> None:
    """Discard the unwritten rest of stdout, which would fail again when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
