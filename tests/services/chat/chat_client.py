"""Client of chats in tests: messages, tools, requests, and answers joined from their events."""

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import pytest

from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.types.v1 import types_pb2 as types

if TYPE_CHECKING:
    from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceAsyncStub
    from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceAsyncStub

GREEDY = types.SamplingParams(temperature=0)
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "unit": {"enum": ["celsius", "fahrenheit"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
}
REQUIRED = completion.ToolChoice(mode=completion.TOOL_MODE_REQUIRED)


@dataclass(slots=True)
class Message:
    """One choice, joined from its events."""

    content: str = ""
    reasoning: str = ""
    calls: list[completion.ToolCall] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    data: bytes = b""
    logprobs: list[float] = field(default_factory=list)
    candidates: list[bytes] = field(default_factory=list)
    deltas: int = 0
    reason: str = ""

    def take(self, delta: completion.ChoiceDelta) -> None:
        assert delta.position == len(self.ids)
        self.deltas += 1
        self.content += delta.text
        self.reasoning += delta.reasoning
        self.ids.extend(delta.token_ids)
        self.scored.extend(delta.tokens.ids)
        self.logprobs.extend(delta.tokens.logprobs)
        self.data += b"".join(delta.token_bytes)
        self.candidates.extend(delta.top_bytes)
        for call in delta.tool_calls:
            if call.id:
                assert call.index == len(self.calls)
                self.calls.append(completion.ToolCall(id=call.id, name=call.name))
            self.calls[call.index].arguments_json += call.arguments_json

    def called(self) -> list[tuple[str, object]]:
        return [(call.name, json.loads(call.arguments_json)) for call in self.calls]


@dataclass(slots=True)
class Answer:
    """Answer to one chat, joined from its events."""

    messages: dict[int, Message] = field(default_factory=dict)
    accepted: completion.Accepted = field(default_factory=completion.Accepted)
    usage: types.Usage = field(default_factory=types.Usage)

    @property
    def message(self) -> Message:
        return self.messages[0]

    def take(self, event: completion.GenerateResponse) -> None:
        kind = event.WhichOneof("event")
        if kind == "accepted":
            self.accepted = event.accepted
        elif kind == "delta":
            self.messages.setdefault(event.delta.index, Message()).take(event.delta)
        elif kind == "finished":
            reason = types.FinishReason.Name(event.finished.reason)
            message = self.messages.setdefault(event.finished.index, Message())
            message.reason = reason.removeprefix("FINISH_REASON_")
        elif kind == "completed":
            self.usage = event.completed.usage


@dataclass(frozen=True, slots=True)
class Services:
    completions: "CompletionServiceAsyncStub"
    tokenizer: "TokenizerServiceAsyncStub"

    async def chat(self, *messages: completion.Message, **fields: object) -> Answer:
        answer = Answer()
        async for event in self.completions.Generate(make_request(*messages, **fields)):
            answer.take(event)
        return answer

    async def refused(self, *messages: completion.Message, **fields: object) -> ServiceError:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.chat(*messages, **fields)
        return ServiceError.from_rpc_error(caught.value)


def make_request(*messages: completion.Message, **fields: object) -> completion.GenerateRequest:
    """Return a request; fields of the conversation stand among the others."""
    names = completion.Conversation.DESCRIPTOR.fields_by_name
    own = {name: fields.pop(name) for name in [*fields] if name in names}
    return completion.GenerateRequest(
        conversation=completion.Conversation(messages=messages, **own),  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


def says(role: "completion.Role.ValueType", *texts: str, **fields: object) -> completion.Message:
    parts = [completion.ContentPart(text=text) for text in texts]
    return completion.Message(role=role, parts=parts, **fields)  # type: ignore[arg-type]


def user(*texts: str) -> completion.Message:
    return says(completion.ROLE_USER, *texts)


def tool(
    name: str = "get_weather", schema: object = WEATHER, *, strict: bool = False
) -> completion.Tool:
    return completion.Tool(
        name=name,
        description=f"Calls {name}",
        parameters_json=json.dumps(schema) if schema is not None else "",
        strict=strict,
    )
