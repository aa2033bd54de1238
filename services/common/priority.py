"""Scheduling priority and tenant in the headers or the metadata of a request."""

import re

from tokenwire.errors import invalid

__all__ = ["PRIORITY_KEY", "PRIORITY_LIMIT", "TENANT_KEY", "parse_priority"]

PRIORITY_KEY = "x-priority"
TENANT_KEY = "x-tenant"
PRIORITY_LIMIT = 2**31
"""Limit of priorities, which are int32: -limit <= priority < limit"""
_INTEGER = re.compile(r"[+-]?[0-9]{1,10}")


def parse_priority(text: str) -> int:
    """Return the priority that `text` names. Raises INVALID_ARGUMENT if it is not an int32."""
    if not _INTEGER.fullmatch(text) or not -PRIORITY_LIMIT <= int(text) < PRIORITY_LIMIT:
        raise invalid(
            PRIORITY_KEY,
            f"{PRIORITY_KEY} must be an integer from {-PRIORITY_LIMIT} to {PRIORITY_LIMIT - 1}, "
            f"got {text!r}.",
        )
    return int(text)
