"""Assembler of an answer's parts: reasoning, text and calls of tools, as they follow each other."""

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from services.http_shim.dialects.custom_tools import CustomInput
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["Change", "Part", "PartAssembler", "PartKind", "Step", "arguments_object", "parts_of"]


_EMPTY_OBJECT = Raw(b"{}")


class PartKind(enum.Enum):
    """Kind of a part."""

    REASONING = enum.auto()
    TEXT = enum.auto()
    CALL = enum.auto()
    CUSTOM_CALL = enum.auto()
    """Call of a custom tool, whose input is text"""


class Step(enum.Enum):
    """A step in the life of a part."""

    OPENED = enum.auto()
    GROWN = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True)
class Part:
    """A part of an answer."""

    kind: PartKind
    index: int = 0
    """Index of a call among the calls"""
    call_id: str = ""
    name: str = ""
    """Name of the called tool"""
    pieces: list[str] = field(default_factory=list)
    """Pieces of its text, in the order in which they came; none if the text is not kept"""

    @property
    def text(self) -> str:
        """Reasoning or text; of a call its arguments as JSON text, or its input if it is custom."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Change:
    """A step of a part."""

    step: Step
    part: Part
    number: int
    """Number of the part among all, from 0"""
    pieces: list[str] = field(default_factory=list)
    """The text by which the part has grown, as it came"""
    deltas: list[completion_pb2.ChoiceDelta] = field(default_factory=list)
    """The deltas of which that text is, unless it is of a call"""

    @property
    def text(self) -> str:
        """The text by which the part has grown."""
        pieces = self.pieces
        return pieces[0] if len(pieces) == 1 else "".join(pieces)


class PartAssembler:
    """Divides the deltas of a choice into parts. The arguments of custom tools become their input.

    A part ends when another one begins; only the arguments of a call may still come then.
    """

    def __init__(self, custom_tools: Collection[str] = (), *, keeps_text: bool = True) -> None:
        """custom_tools: names of the tools whose input is text.

        keeps_text: whether the parts have their text. A writer that sends each step needs none.
        """
        self.parts: list[Part] = []
        """All parts, of which the last may still grow"""
        self._custom_tools = custom_tools
        self._keeps_text = keeps_text
        self._is_open = False
        self._calls: dict[int, int] = {}
        """Number of the part of each call, by the call's index"""
        self._inputs: dict[int, CustomInput] = {}
        """Input of each call of a custom tool, by the number of its part"""

    def add(self, deltas: Iterable[completion_pb2.ChoiceDelta]) -> list[Change]:
        """Add deltas; return the steps of the parts. Neighbours of one kind become one step."""
        changes: list[Change] = []
        for delta in deltas:
            calls = delta.tool_calls
            for call in calls:  # the arguments of known calls come before what follows them
                if call.index in self._calls:
                    self._add_call(changes, call)
            if text := delta.reasoning:
                self._add_text(changes, PartKind.REASONING, text, delta)
            if text := delta.text:
                self._add_text(changes, PartKind.TEXT, text, delta)
            known = {*self._calls} if calls else ()
            for call in calls:
                if call.index not in known:
                    self._add_call(changes, call)
        return changes

    def close(self) -> list[Change]:
        """Return the end of the last part, if it is open."""
        changes: list[Change] = []
        if self._is_open:
            self._is_open = False
            number = len(self.parts) - 1
            if (reader := self._inputs.get(number)) is not None:
                self._grow(changes, number, reader.finish())
            changes.append(Change(Step.CLOSED, self.parts[-1], number))
        return changes

    def _add_text(
        self,
        changes: list[Change],
        kind: PartKind,
        text: str,
        delta: completion_pb2.ChoiceDelta,
    ) -> None:
        if not (self._is_open and self.parts[-1].kind is kind):
            self._open(changes, Part(kind))
        number, last = len(self.parts) - 1, changes[-1] if changes else None
        if last is not None and last.step is Step.GROWN and last.number == number:
            if self._keeps_text:
                last.part.pieces.append(text)
            last.pieces.append(text)
        else:
            self._grow(changes, number, text)
        changes[-1].deltas.append(delta)

    def _add_call(self, changes: list[Change], call: completion_pb2.ToolCallDelta) -> None:
        number = self._calls.get(call.index)
        if number is None:
            is_custom = call.name in self._custom_tools
            kind = PartKind.CUSTOM_CALL if is_custom else PartKind.CALL
            self._open(changes, Part(kind, call.index, call.id, call.name))
            number = self._calls[call.index] = len(self.parts) - 1
            if is_custom:
                self._inputs[number] = CustomInput()
        reader, arguments = self._inputs.get(number), call.arguments_json
        self._grow(changes, number, arguments if reader is None else reader.feed(arguments))

    def _open(self, changes: list[Change], part: Part) -> None:
        """Begin a part, after the end of the last one."""
        changes += self.close()
        self.parts.append(part)
        self._is_open = True
        changes.append(Change(Step.OPENED, part, len(self.parts) - 1))

    def _grow(self, changes: list[Change], number: int, text: str) -> None:
        if text:
            part = self.parts[number]
            if self._keeps_text:
                part.pieces.append(text)
            changes.append(Change(Step.GROWN, part, number, [text]))


def parts_of(
    deltas: Iterable[completion_pb2.ChoiceDelta], custom_tools: Collection[str] = ()
) -> list[Part]:
    """Return the parts of a whole choice; custom_tools: names of the tools whose input is text."""
    assembler = PartAssembler(custom_tools)
    assembler.add(deltas)
    assembler.close()
    return assembler.parts


def arguments_object(text: str) -> Raw:
    """Return the JSON object of the arguments that a model wrote.

    Text that is no object becomes the field "arguments" of one.
    """
    try:
        if isinstance(msgspec.json.decode(text), dict):
            return Raw(text.encode())
    except msgspec.DecodeError:
        pass
    return Raw(msgspec.json.encode({"arguments": text})) if text else _EMPTY_OBJECT
