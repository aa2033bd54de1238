"""JSON of responses, whole and as events of a stream."""

import uuid
from collections.abc import Collection, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct, field

from services.http_shim.errors import http_status, public_message
from services.http_shim.formats.chat_responses import ContentLogprob, logprobs_of
from services.http_shim.formats.custom_tools import CustomInput
from services.http_shim.formats.openai_responses.response_requests import PreparedResponse
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "CallOutput",
    "CustomCallOutput",
    "ItemEvents",
    "MessageOutput",
    "OutputItem",
    "ReasoningOutput",
    "ResponseObject",
    "ResponseUsage",
    "begin_output",
    "begun_response",
    "cancel_response",
    "end_response",
    "fail_response",
    "has_ended",
    "interrupted_response",
    "is_cut",
    "output_of",
]

_encode = msgspec.json.Encoder().encode
_QUEUED, _IN_PROGRESS, _COMPLETED, _INCOMPLETE, _CANCELLED, _FAILED = (
    *("queued", "in_progress", "completed"),
    *("incomplete", "cancelled", "failed"),
)
_FUNCTION: dict[str, Any] = {"strict": False, "parameters": None}
"""Fields of a function that clients may leave out"""


class OutputText(Struct, tag_field="type", tag="output_text"):
    """Text of an answer."""

    text: str
    annotations: list[None] = []
    logprobs: list[ContentLogprob] = []


class MessageOutput(Struct, tag_field="type", tag="message"):
    """A message of an answer."""

    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class ReasoningText(Struct, tag_field="type", tag="reasoning_text"):
    """Reasoning of an answer."""

    text: str


class ReasoningOutput(Struct, tag_field="type", tag="reasoning"):
    """Reasoning of an answer; it has no summary."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[None] = []


class CallOutput(Struct, tag_field="type", tag="function_call"):
    """A call of a function; `arguments` is JSON text."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class CustomCallOutput(Struct, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    call_id: str
    name: str
    input: str
    status: str


OutputItem: TypeAlias = MessageOutput | ReasoningOutput | CallOutput | CustomCallOutput


class InputTokens(Struct):
    """Tokens of the prompt."""

    cached_tokens: int = 0


class OutputTokens(Struct):
    """Tokens of the answer, of which some are reasoning."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Tokens of a response."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class ResponseFailure(Struct):
    """The failure of a response."""

    code: str
    message: str


class IncompleteDetails(Struct):
    """Why a response is incomplete."""

    reason: str


class ResponseObject(Struct):
    """A response."""

    id: str
    created_at: int
    status: str
    model: str
    output: list[OutputItem]
    object: str = "response"
    background: bool = False
    completed_at: int | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, str] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any] = field(default_factory=dict)
    service_tier: str = "default"
    store: bool = True
    temperature: float | None = None
    text: dict[str, Any] = field(default_factory=dict)
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = field(default_factory=list)
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


def begun_response(
    identity: str, created: int, model: str, prepared: PreparedResponse
) -> ResponseObject:
    """Return a response without output. created: seconds of the epoch.

    One in the background is queued until its output begins.
    """
    body = prepared.body
    tools = body.tools or []
    form = None if body.text is None else body.text.format
    text = {"type": "text"} if form is None else _without_nulls(msgspec.json.decode(_encode(form)))
    effort = None if body.reasoning is None else body.reasoning.effort
    return ResponseObject(
        identity,
        created,
        _QUEUED if body.background else _IN_PROGRESS,
        model,
        [],
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning={"effort": effort, "summary": None},
        store=body.store is not False,
        temperature=body.temperature,
        text={"format": text},
        tool_choice=body.tool_choice or "auto",
        tools=[_FUNCTION | tool if tool.get("type") == "function" else tool for tool in tools],
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def end_response(
    response: ResponseObject,
    output: list[OutputItem],
    finished: completion_pb2.ChoiceFinished,
    usage: types_pb2.Usage,
    now: int,
) -> None:
    """Make a response complete, or incomplete if a limit cut it. now: seconds of the epoch."""
    response.output = output
    if is_cut(finished):
        response.status = _INCOMPLETE
        response.incomplete_details = IncompleteDetails("max_output_tokens")
    else:
        response.status = _COMPLETED
        response.completed_at = now
    response.usage = ResponseUsage(
        usage.prompt_tokens,
        InputTokens(usage.cached_tokens),
        usage.completion_tokens,
        OutputTokens(usage.reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )


def is_cut(finished: completion_pb2.ChoiceFinished) -> bool:
    """Return whether a limit of tokens ended an answer."""
    return finished.reason == types_pb2.FINISH_REASON_LENGTH


def fail_response(response: ResponseObject, output: list[OutputItem], error: ServiceError) -> None:
    """Make a response failed, with the output that it had."""
    code = "rate_limit_exceeded" if http_status(error.code) == 429 else "server_error"
    response.output = output
    response.status = _FAILED
    response.error = ResponseFailure(code, public_message(error))


def cancel_response(response: ResponseObject, output: list[OutputItem]) -> None:
    """Make a response cancelled, with the output that it had."""
    response.output = output
    response.status = _CANCELLED


def begin_output(response: ResponseObject) -> bool:
    """Make a queued response one in progress; return whether it was queued."""
    was_queued = response.status == _QUEUED
    if was_queued:
        response.status = _IN_PROGRESS
    return was_queued


def has_ended(response: ResponseObject) -> bool:
    """Return whether a response is in its final state."""
    return response.status not in (_QUEUED, _IN_PROGRESS)


def interrupted_response(encoded: bytes) -> bytes:
    """Return the JSON of a running response as one that failed because its server ended."""
    response = msgspec.json.decode(encoded)
    error = ResponseFailure("server_error", "The server ended before the response was complete.")
    return _encode(response | {"status": _FAILED, "error": error})


class ItemEvents:
    """Converts the deltas of an answer to items of the output, and to the events of a stream."""

    def __init__(self, *, has_logprobs: bool, custom_tools: Collection[str] = ()) -> None:
        """custom_tools: names of the tools whose input is text."""
        self.items: list[OutputItem] = []
        """All items, the last of which may be open"""
        self._has_logprobs = has_logprobs
        self._custom_tools = custom_tools
        self._input = CustomInput()
        """Input of the last call, if it is one of a custom tool"""
        self._open: tuple[str, int] | None = None
        """Kind of the last item if it is open, and for a call its index among the calls"""
        self._sequence = 0

    def event(self, kind: str, /, **fields: Any) -> bytes:
        """Return a server-sent event with the next number."""
        data = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(data))

    def of(self, delta: completion_pb2.ChoiceDelta) -> Iterator[bytes]:
        """Yield the events of a delta."""
        if delta.reasoning:
            yield from self._opened(("reasoning", 0), ReasoningOutput(_id("rs"), _IN_PROGRESS, []))
            yield from self._add_reasoning(delta.reasoning)
        if delta.text:
            yield from self._opened(("message", 0), MessageOutput(_id("msg"), _IN_PROGRESS, []))
            yield from self._add_text(delta)
        for call in delta.tool_calls:
            yield from self._opened(("function_call", call.index), self._call(call))
            if call.arguments_json:
                yield from self._add_arguments(call.arguments_json)

    def close(self, *, is_cut: bool) -> Iterator[bytes]:
        """Yield the end of the open item, if there is one. is_cut: whether a limit ended it."""
        if self._open is None:
            return
        self._open = None
        item = self.items[-1]
        if isinstance(item, CustomCallOutput):
            yield from self._add_input(item, self._input.finish())
        match item:
            case MessageOutput(content=[text]):
                yield self._event(
                    "response.output_text.done", 0, text=text.text, logprobs=text.logprobs
                )
                yield self._event("response.content_part.done", 0, part=text)
            case ReasoningOutput(content=[text]):
                yield self._event("response.reasoning_text.done", 0, text=text.text)
                yield self._event("response.content_part.done", 0, part=text)
            case CallOutput():
                yield self._event(
                    "response.function_call_arguments.done",
                    arguments=item.arguments,
                    name=item.name,
                )
            case CustomCallOutput():
                yield self._event("response.custom_tool_call_input.done", input=item.input)
        item.status = _INCOMPLETE if is_cut else _COMPLETED
        yield self.event("response.output_item.done", output_index=len(self.items) - 1, item=item)

    def _call(self, call: completion_pb2.ToolCallDelta) -> CallOutput | CustomCallOutput:
        if call.name in self._custom_tools:
            return CustomCallOutput(_id("ctc"), call.id, call.name, "", _IN_PROGRESS)
        return CallOutput(_id("fc"), call.id, call.name, "", _IN_PROGRESS)

    def _opened(self, kind: tuple[str, int], item: OutputItem) -> Iterator[bytes]:
        if kind == self._open:
            return
        yield from self.close(is_cut=False)
        self.items.append(item)
        self._open = kind
        self._input = CustomInput()
        yield self.event("response.output_item.added", output_index=len(self.items) - 1, item=item)

    def _add_text(self, delta: completion_pb2.ChoiceDelta) -> Iterator[bytes]:
        item = self.items[-1]
        assert isinstance(item, MessageOutput)
        if not item.content:
            item.content = [OutputText("", [], [])]
            yield self._event("response.content_part.added", 0, part=item.content[0])
        logprobs = logprobs_of([delta]) if self._has_logprobs else []
        item.content[0].text += delta.text
        item.content[0].logprobs += logprobs
        yield self._event("response.output_text.delta", 0, delta=delta.text, logprobs=logprobs)

    def _add_reasoning(self, text: str) -> Iterator[bytes]:
        item = self.items[-1]
        assert isinstance(item, ReasoningOutput)
        if not item.content:
            item.content = [ReasoningText("")]
            yield self._event("response.content_part.added", 0, part=item.content[0])
        item.content[0].text += text
        yield self._event("response.reasoning_text.delta", 0, delta=text)

    def _add_arguments(self, arguments: str) -> Iterator[bytes]:
        item = self.items[-1]
        if isinstance(item, CustomCallOutput):
            yield from self._add_input(item, self._input.feed(arguments))
            return
        assert isinstance(item, CallOutput)
        item.arguments += arguments
        yield self._event("response.function_call_arguments.delta", delta=arguments)

    def _add_input(self, item: CustomCallOutput, text: str) -> Iterator[bytes]:
        if text:
            item.input += text
            yield self._event("response.custom_tool_call_input.delta", delta=text)

    def _event(self, kind: str, content_index: int | None = None, /, **fields: Any) -> bytes:
        """Return an event of the open item."""
        place: dict[str, Any] = {
            "item_id": self.items[-1].id,
            "output_index": len(self.items) - 1,
        }
        if content_index is not None:
            place["content_index"] = content_index
        return self.event(kind, **place, **fields)


def output_of(
    deltas: Sequence[completion_pb2.ChoiceDelta],
    finished: completion_pb2.ChoiceFinished,
    *,
    has_logprobs: bool,
    custom_tools: Collection[str] = (),
) -> list[OutputItem]:
    """Return the items of a whole answer; custom_tools: names of the tools whose input is text."""
    events = ItemEvents(has_logprobs=has_logprobs, custom_tools=custom_tools)
    for delta in deltas:
        for _ in events.of(delta):
            pass
    for _ in events.close(is_cut=is_cut(finished)):
        pass
    return events.items


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
