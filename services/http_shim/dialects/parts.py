"""Assembler of an answer's parts: reasoning, text and calls of tools, as they follow each other."""

import enum
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from services.http_shim.dialects.custom_tools import CustomInput
from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["Change", "Part", "PartAssembler", "PartKind", "Step", "parts_of"]


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
    """Its text as it came"""

    @property
    def text(self) -> str:
        """Its reasoning or text; a call's arguments as JSON text, or the input of a custom tool."""
        return "".join(self.pieces)


@dataclass(slots=True)
class Change:
    """A step of a part."""

    step: Step
    part: Part
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

    A part ends when another one begins.
    """

    def __init__(self, custom_tools: Collection[str] = ()) -> None:
        """custom_tools: names of the tools whose input is text."""
        self.parts: list[Part] = []
        """All parts, of which the last may still grow"""
        self._custom_tools = custom_tools
        self._is_open = False
        self._input = CustomInput()
        """Input of the last part, if it calls a custom tool"""

    def add(self, deltas: Iterable[completion_pb2.ChoiceDelta]) -> list[Change]:
        """Add deltas; return the steps of the parts. Neighbours of one kind become one step."""
        changes: list[Change] = []
        for delta in deltas:
            if text := delta.reasoning:
                self._add_text(changes, PartKind.REASONING, text, delta)
            if text := delta.text:
                self._add_text(changes, PartKind.TEXT, text, delta)
            for call in delta.tool_calls:
                self._add_call(changes, call)
        return changes

    def close(self) -> list[Change]:
        """Return the end of the last part, if it is open."""
        changes: list[Change] = []
        if self._is_open:
            self._is_open = False
            part = self.parts[-1]
            if part.kind is PartKind.CUSTOM_CALL:
                self._grow(changes, part, self._input.finish())
            changes.append(Change(Step.CLOSED, part))
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
        last = changes[-1] if changes else None
        if last is not None and last.step is Step.GROWN:  # of the same part, which is open
            last.part.pieces.append(text)
            last.pieces.append(text)
            last.deltas.append(delta)
        else:
            self._grow(changes, self.parts[-1], text)
            changes[-1].deltas.append(delta)

    def _add_call(self, changes: list[Change], call: completion_pb2.ToolCallDelta) -> None:
        last = self.parts[-1] if self._is_open else None
        is_call = last is not None and last.kind in (PartKind.CALL, PartKind.CUSTOM_CALL)
        if last is None or not is_call or last.index != call.index:
            is_custom = call.name in self._custom_tools
            kind = PartKind.CUSTOM_CALL if is_custom else PartKind.CALL
            self._open(changes, Part(kind, call.index, call.id, call.name))
        part, arguments = self.parts[-1], call.arguments_json
        is_custom = part.kind is PartKind.CUSTOM_CALL
        self._grow(changes, part, self._input.feed(arguments) if is_custom else arguments)

    def _open(self, changes: list[Change], part: Part) -> None:
        """Begin a part, after the end of the last one."""
        changes += self.close()
        self.parts.append(part)
        self._is_open = True
        if part.kind is PartKind.CUSTOM_CALL:
            self._input = CustomInput()
        changes.append(Change(Step.OPENED, part))

    def _grow(self, changes: list[Change], part: Part, text: str) -> None:
        if text:
            part.pieces.append(text)
            changes.append(Change(Step.GROWN, part, [text]))


def parts_of(
    deltas: Iterable[completion_pb2.ChoiceDelta], custom_tools: Collection[str] = ()
) -> list[Part]:
    """Return the parts of a whole choice; custom_tools: names of the tools whose input is text."""
    assembler = PartAssembler(custom_tools)
    assembler.add(deltas)
    assembler.close()
    return assembler.parts
