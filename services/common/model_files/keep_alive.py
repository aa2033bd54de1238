"""Keep-alive: how long a model stays in memory after its last use, in Ollama's forms."""

import math
import re

__all__ = ["DEFAULT_KEEP_ALIVE", "parse_keep_alive"]

DEFAULT_KEEP_ALIVE = 300.0
"""Seconds, as Ollama has them"""
_LONGEST = 100
"""Most characters of a time"""
_UNITS = {
    "ns": 1e-9,
    "us": 1e-6,
    "µs": 1e-6,
    "μs": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
}
_PART = r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)"
_DURATION = re.compile(rf"([+-]?)((?:{_PART})+)")
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d+)?")


def parse_keep_alive(value: str | float) -> float:
    """Return the seconds of "5m", "1h30m", "-1s", "90" or 90; infinity for a negative time.

    Raises ValueError, whose message has no subject: "must be a number of seconds, …".
    """
    seconds = _seconds(value) if isinstance(value, str) else float(value)
    if seconds is None or math.isnan(seconds):
        raise ValueError(
            "must be a number of seconds, or a duration such as 5m or 1h30m; 0 unloads at once, a "
            f"negative one keeps the model for ever; got {str(value)[:_LONGEST]!r}"
        )
    return math.inf if seconds < 0 else seconds


def _seconds(text: str) -> float | None:
    text = text.strip()
    if len(text) > _LONGEST:
        return None
    if _NUMBER.fullmatch(text):
        return float(text)
    match = _DURATION.fullmatch(text)
    if match is None:
        return None
    seconds = sum(float(count) * _UNITS[unit] for count, unit in re.findall(_PART, match[2]))
    return -seconds if match[1] == "-" else seconds
