"""How much a JSON text holds: counted before it is decoded, because decoders do not stop."""

import re

import grpc

from tokenwire.errors import ServiceError

__all__ = ["check_json_limits"]

_MOST_FIELDS = 1_000  # of the body itself
_MOST_STRINGS = 300_000  # names of fields too: a logit_bias may have one for each id
_MOST_CONTAINERS = 65_536
_MOST_VALUES = 1 << 20  # token ids, nearly always
_BRACKET = re.compile(rb"[\[\]{}]")


def check_json_limits(text: bytes) -> None:
    """Raise INVALID_ARGUMENT for a body that holds more than any request needs.

    Takes some 20 ms for 8 MiB. What is no JSON may pass: a decoder stops where it ceases to be
    JSON, and up to there the counts are right.
    """
    # without escapes, every quote begins or ends a string
    bare = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    _require(bare.count(b'"') // 2, _MOST_STRINGS, "strings")
    outside = b"".join(bare.split(b'"')[::2])
    _require(outside.count(b"[") + outside.count(b"{"), _MOST_CONTAINERS, "lists and objects")
    _require(outside.count(b","), _MOST_VALUES, "values")
    _require(_top_commas(outside), _MOST_FIELDS, "fields")


def _require(count: int, most: int, what: str) -> None:
    if count > most:
        raise ServiceError(
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_BODY",
            f"The body holds {count:,} {what}; {most:,} are the most.",
        )


def _top_commas(outside: bytes) -> int:
    """The commas between the fields of the outermost object."""
    depth = count = end = 0
    for bracket in _BRACKET.finditer(outside):
        if depth == 1:
            count += outside.count(b",", end, bracket.start())
        depth += 1 if bracket[0] in b"[{" else -1
        end = bracket.end()
    return count + outside.count(b",", end) if depth == 1 else count
