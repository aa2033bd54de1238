"""Server-sent events of a response: their types, and the responses that they have."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Struct

__all__ = ["StreamedEvent", "events_of", "response_of"]

_END = b"\n\n"
_ENDING = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "response.cancelled"}
)
_STATES = frozenset({"response.created", "response.queued", "response.in_progress"} | _ENDING)
"""Types of the events that have the response as it then is"""


@dataclass(frozen=True, slots=True)
class StreamedEvent:
    """An event."""

    encoded: bytes
    """The event as it is streamed, with the empty line after it"""
    type: str
    json: bytes
    """Data of the event, a JSON object"""

    @property
    def is_last(self) -> bool:
        """True if the response has ended with it."""
        return self.type in _ENDING


class _State(Struct):
    """The part of an event that has the response."""

    response: msgspec.Raw


def events_of(encoded: bytes) -> Iterator[StreamedEvent]:
    """Yield the events of a piece of a stream, without its comments."""
    for event in encoded.split(_END):
        head, _, data = event.partition(b"\n")
        if head.startswith(b"event: "):
            kind, json = head.removeprefix(b"event: "), data.removeprefix(b"data: ")
            yield StreamedEvent(event + _END, kind.decode(), json)


def response_of(event: StreamedEvent) -> bytes | None:
    """Return the response that an event has, a JSON object; None if it has none."""
    if event.type not in _STATES:
        return None
    return bytes(msgspec.json.decode(event.json, type=_State).response)
