"""Messages and answers of a chat: frozen dataclasses, read from and written to protobuf."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.results import FinishReason, Scores, Usage

__all__ = [
    "ChatAnswer",
    "ChatChoice",
    "ChatDelta",
    "ContentToken",
    "Message",
    "Role",
    "ToolCall",
    "ToolCallDelta",
]

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a message."""

    id: str
    name: str
    arguments: str
    """JSON text; incomplete where max_tokens cut it"""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation. The next request takes an answer's message unchanged."""

    role: Role
    content: str | None
    """Text; None where the message holds only tool calls or reasoning"""
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
class ContentToken:
    """A token of the content, its natural-log probability, and the most likely candidates."""

    id: int
    data: bytes
    """Bytes that the token adds to the content; they may end inside a character"""
    logprob: float
    rank: int
    top: "tuple[tuple[int, bytes, float], ...]"
    """(id, bytes, logprob) of each candidate, best first; empty unless requested"""


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Part of a tool call; only the first delta of a call has id and name."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """Part of a choice. The last delta of a choice has its finish_reason."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    token_ids: tuple[int, ...] = ()
    """All generated ids, also those of reasoning and calls; their text may come in a later delta"""
    position: int = 0
    """Position of the first of these ids, counted from the end of the prompt"""
    tokens: tuple[ContentToken, ...] = ()
    """Tokens of the content; only with logprobs"""
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    """Stop string or token id that ended the choice"""

    @classmethod
    def read(cls, delta: completion_pb2.ChatDelta) -> "ChatDelta":
        calls = delta.tool_calls
        return cls(
            index=delta.index,
            content=delta.content,
            reasoning=delta.reasoning,
            tool_calls=tuple(
                ToolCallDelta(call.index, call.id, call.name, call.arguments_json) for call in calls
            ),
            token_ids=tuple(delta.token_ids),
            position=delta.position,
            tokens=_content_tokens(delta.tokens, delta.token_bytes, delta.top_bytes),
        )


@dataclass(frozen=True, slots=True)
class ChatChoice:
    """One answer."""

    index: int
    message: Message
    finish_reason: FinishReason
    stop: str | int | None
    token_ids: tuple[int, ...]
    tokens: tuple[ContentToken, ...]

    @classmethod
    def join(cls, deltas: Sequence[ChatDelta]) -> "ChatChoice":
        """Return the choice that the deltas make up."""
        last = deltas[-1]
        assert last.finish_reason is not None
        content = "".join(delta.content for delta in deltas) or None
        calls = _join_calls(chain.from_iterable(delta.tool_calls for delta in deltas))
        message = Message(
            role="assistant",
            content=content,
            tool_calls=calls,
            reasoning="".join(delta.reasoning for delta in deltas),
        )
        return cls(
            last.index,
            message,
            last.finish_reason,
            last.stop,
            tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
            tuple(chain.from_iterable(delta.tokens for delta in deltas)),
        )


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """Answer to a chat."""

    model: str
    system_fingerprint: str
    seed: int
    choices: tuple[ChatChoice, ...]
    usage: Usage
    ignored: tuple[str, ...] = ()
    """Paths of schema parts in the request that have no effect"""
    prompt_scores: Scores | None = None
    """Scores of prompt tokens from token 1 on: entry i is token i + 1. Only with prompt_logprobs"""

    @property
    def message(self) -> Message:
        """The message of the first choice."""
        return self.choices[0].message

    @property
    def text(self) -> str:
        """The first choice's content; "" where it has none."""
        return self.message.content or ""


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str] = field(default_factory=list)


def _join_calls(parts: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    calls: dict[int, _Call] = {}
    for part in parts:
        call = calls.setdefault(part.index, _Call(part.id, part.name))
        call.arguments.append(part.arguments)
    return tuple(
        ToolCall(call.id, call.name, "".join(call.arguments)) for _, call in sorted(calls.items())
    )


def _content_tokens(
    columns: types_pb2.TokenColumns, data: Sequence[bytes], top_data: Sequence[bytes]
) -> tuple[ContentToken, ...]:
    width = columns.top_width
    top = list(zip(columns.top_ids, top_data, columns.top_logprobs, strict=True))
    rows = zip(columns.ids, data, columns.logprobs, columns.ranks, strict=True)
    return tuple(
        ContentToken(*row, tuple(top[i * width : (i + 1) * width])) for i, row in enumerate(rows)
    )
