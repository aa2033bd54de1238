"""Durations as Go writes them, such as 1h30m, for `keep_alive`."""

import math
import re

from tokenwire.errors import invalid

__all__ = ["keep_alive_seconds"]

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1, "m": 60, "h": 3600}
_PART = re.compile(r"(\d+\.?\d*|\.\d+)(ns|us|µs|μs|ms|s|m|h)", re.ASCII)
_DURATION = re.compile(rf"[+-]?(?:{_PART.pattern})+|[+-]?0", re.ASCII)
_LONGEST = 100  # characters; Go's own are shorter


def keep_alive_seconds(value: float | str) -> float:
    """Return the seconds of a `keep_alive`; infinity for a negative one.

    Raises INVALID_ARGUMENT for a text that is no duration.
    """
    if isinstance(value, str):
        if len(value) > _LONGEST or _DURATION.fullmatch(value) is None:
            raise invalid(
                "keep_alive",
                "keep_alive must be seconds, or a duration such as 5m or 1h30m, "
                f"got {value[:_LONGEST]!r}.",
            )
        size = sum(float(number) * _UNITS[unit] for number, unit in _PART.findall(value))
        value = -size if value.startswith("-") else size
    return math.inf if value < 0 else value
