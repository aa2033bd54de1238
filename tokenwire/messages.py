"""Messages of a conversation, and tool calls, as frozen dataclasses with conversion to protobuf."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from tokenwire.pb.completion.v1 import completion_pb2

__all__ = ["Message", "Role", "ToolCall", "ToolCallDelta", "join_calls"]

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a message."""

    id: str
    name: str
    arguments: str
    """Arguments as JSON text; incomplete if max_tokens cut it"""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. The next request takes an answer's message unchanged."""

    role: Role
    content: str | None
    """Text of the message; None if it holds only tool calls or reasoning"""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""
    """Id of the call that a tool message answers"""
    name: str = ""
    reasoning: str = ""
    images: Sequence[bytes] = field(default=(), repr=False)
    """Encoded images (PNG, JPEG, WebP or GIF), which stand before the text"""

    def write(self) -> completion_pb2.Message:
        parts = [completion_pb2.ContentPart(image=image) for image in self.images]
        if self.content is not None:
            parts.append(completion_pb2.ContentPart(text=self.content))
        return completion_pb2.Message(
            role=completion_pb2.Role.Value(f"ROLE_{self.role.upper()}"),
            parts=parts,
            name=self.name,
            tool_calls=[
                completion_pb2.ToolCall(id=call.id, name=call.name, arguments_json=call.arguments)
                for call in self.tool_calls
            ],
            tool_call_id=self.tool_call_id,
            reasoning=self.reasoning,
        )


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Part of a tool call; only the first delta of a call has id and name."""

    index: int
    id: str
    name: str
    arguments: str

    @classmethod
    def read(cls, delta: completion_pb2.ToolCallDelta) -> "ToolCallDelta":
        return cls(delta.index, delta.id, delta.name, delta.arguments_json)


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


def join_calls(parts: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """Return the calls that consist of the parts."""
    calls: dict[int, _Call] = {}
    for part in parts:
        call = calls.setdefault(part.index, _Call(part.id, part.name))
        call.arguments.append(part.arguments)
    return tuple(
        ToolCall(call.id, call.name, "".join(call.arguments)) for _, call in sorted(calls.items())
    )
