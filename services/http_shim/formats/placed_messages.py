"""Messages of a chat that were made of other things, and the client's names of their parts."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["PlacedMessage", "begun", "place_of", "tool_place"]

_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.(?P<list>parts|tool_calls)\[(?P<at>\d+)\])?(.*)")
_TOOL = re.compile(r"tools\[(\d+)\](?:\.(\w+))?(.*)")


@dataclass(slots=True)
class PlacedMessage:
    """A message of the chat, and where the client wrote it."""

    message: completion_pb2.Message
    place: str
    """The client's name of the message"""
    part_places: list[str] = field(default_factory=list)
    """The client's name of each part"""
    call_places: list[str] = field(default_factory=list)
    """The client's name of each tool call"""

    def add_text(self, text: str, place: str) -> None:
        self.message.parts.add(text=text)
        self.part_places.append(place)

    def add_image(self, place: str) -> None:
        """Add an empty place for an image."""
        self.message.parts.add(image=b"")
        self.part_places.append(place)


def begun(role: completion_pb2.Role.ValueType, place: str) -> PlacedMessage:
    """Return a message without parts."""
    return PlacedMessage(completion_pb2.Message(role=role), place)


def place_of(path: str, prompt: Sequence[PlacedMessage]) -> str | None:
    """Return the client's name of a field within the messages; None for other fields."""
    if (found := _MESSAGE.fullmatch(path)) is None:
        return None
    placed = prompt[int(found[1])]
    if found["list"] is None:
        return placed.place
    places = placed.part_places if found["list"] == "parts" else placed.call_places
    return places[int(found["at"])]


def tool_place(path: str, indices: Sequence[int], schema: str) -> tuple[str, str] | None:
    """Return the client's name of a field of a tool, and the rest of the path; None for others.

    indices: of the request's tools in the client's list. schema: the client's name of the
    parameters' schema.
    """
    if (found := _TOOL.fullmatch(path)) is None:
        return None
    number, field, rest = found.groups()
    name = schema if field == "parameters_json" else field
    return f"tools[{indices[int(number)]}]" + (f".{name}" if name else ""), rest
