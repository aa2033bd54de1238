"""Assembler of an answer's parts: reasoning, text and calls of tools, as they follow each other."""

import enum
from collections.abc import Collection, Iterable, Iterator
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
    """What happens to a part."""

    OPENED = enum.auto()
    GROWN = enum.auto()
    CLOSED = enum.auto()


@dataclass(slots=True)
class Part:
    """A part of an answer."""

    kind: PartKind
    text: str = ""
    """Its reasoning or text; the arguments of a call as JSON text, or the input of a custom tool"""
    index: int = 0
    """Index of a call among the calls"""
    call_id: str = ""
    name: str = ""
    """Name of the called tool"""


@dataclass(slots=True)
class Change:
    """A step of a part."""

    step: Step
    part: Part
    text: str = ""
    """The text by which the part has grown"""
    deltas: list[completion_pb2.ChoiceDelta] = field(default_factory=list)
    """The deltas of which that text is, for parts of text"""


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

    def add(self, deltas: Iterable[completion_pb2.ChoiceDelta]) -> Iterator[Change]:
        """Add deltas; yield the steps of the parts. Neighbours of one kind become one step."""
        grown: Change | None = None
        for delta in deltas:
            for kind, text in (
                (PartKind.REASONING, delta.reasoning),
                (PartKind.TEXT, delta.text),
            ):
                if not text:
                    continue
                if grown is None or grown.part.kind is not kind:
                    if grown is not None:
                        yield grown
                    yield from self._opened(Part(kind))
                    grown = Change(Step.GROWN, self.parts[-1])
                grown.part.text += text
                grown.text += text
                grown.deltas.append(delta)
            for call in delta.tool_calls:
                if grown is not None:
                    yield grown
                    grown = None
                yield from self._opened(self._call(call))
                yield from self._argued(call.arguments_json)
        if grown is not None:
            yield grown

    def close(self) -> Iterator[Change]:
        """Yield the end of the last part, if it is open."""
        if not self._is_open:
            return
        self._is_open = False
        part = self.parts[-1]
        if part.kind is PartKind.CUSTOM_CALL and (text := self._input.finish()):
            part.text += text
            yield Change(Step.GROWN, part, text)
        yield Change(Step.CLOSED, part)

    def _call(self, call: completion_pb2.ToolCallDelta) -> Part:
        is_custom = call.name in self._custom_tools
        kind = PartKind.CUSTOM_CALL if is_custom else PartKind.CALL
        return Part(kind, "", call.index, call.id, call.name)

    def _opened(self, part: Part) -> Iterator[Change]:
        """Begin a part unless the open one goes on."""
        if self._is_open and _goes_on(self.parts[-1], part):
            return
        yield from self.close()
        self.parts.append(part)
        self._is_open = True
        if part.kind is PartKind.CUSTOM_CALL:
            self._input = CustomInput()
        yield Change(Step.OPENED, part)

    def _argued(self, arguments_json: str) -> Iterator[Change]:
        part = self.parts[-1]
        is_custom = part.kind is PartKind.CUSTOM_CALL
        text = self._input.feed(arguments_json) if is_custom else arguments_json
        if text:
            part.text += text
            yield Change(Step.GROWN, part, text)


def parts_of(
    deltas: Iterable[completion_pb2.ChoiceDelta], custom_tools: Collection[str] = ()
) -> list[Part]:
    """Return the parts of a whole choice; custom_tools: names of the tools whose input is text."""
    assembler = PartAssembler(custom_tools)
    for _ in assembler.add(deltas):
        pass
    for _ in assembler.close():
        pass
    return assembler.parts


def _goes_on(last: Part, part: Part) -> bool:
    """Return whether a part continues the last one. Later deltas of a call have no name."""
    if part.kind in (PartKind.REASONING, PartKind.TEXT):
        return last.kind is part.kind
    return last.kind in (PartKind.CALL, PartKind.CUSTOM_CALL) and last.index == part.index
