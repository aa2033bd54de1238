"""Writing of responses, whole and as events of a stream."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.content_logprobs import logprobs_of
from services.http_shim.dialects.parts import Change, Part, PartAssembler, PartKind, Step
from services.http_shim.dialects.responses.types import (
    AnswerReasoning,
    AnswerText,
    CallOutput,
    CustomCallOutput,
    IncompleteDetails,
    InputTokens,
    MessageOutput,
    OutputItem,
    OutputTokens,
    ReasoningOutput,
    ResponseBody,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from services.http_shim.dialects.writer import EventWriter, Writer
from services.http_shim.errors import http_status, public_message
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "CANCELLED",
    "Keep",
    "KeptResponse",
    "ResponseWriter",
    "fail_response",
    "has_ended",
]

CANCELLED = "RESPONSE_CANCELLED"
"""Reason of the error that ends a cancelled response"""
_encode = msgspec.json.Encoder().encode
_QUEUED, _IN_PROGRESS, _COMPLETED, _INCOMPLETE, _CANCELLED, _FAILED = (
    *("queued", "in_progress", "completed"),
    *("incomplete", "cancelled", "failed"),
)
_FUNCTION: dict[str, Any] = {"strict": False, "parameters": None}
"""Fields of a function that clients may leave out"""


@dataclass(frozen=True, slots=True)
class KeptResponse:
    """A response, and what a later one needs to continue it."""

    response: ResponseObject
    input: bytes
    """JSON array of its input's items"""
    context: bytes
    """JSON array of the items before these"""

    @property
    def conversation(self) -> bytes:
        """JSON array of all items up to the output."""
        arrays = (self.context, self.input, _encode(self.response.output))
        return b"[%b]" % b",".join(inner for array in arrays if (inner := array[1:-1]))


Keep: TypeAlias = Callable[[KeptResponse], Awaitable[None]]
"""Stores a response; sets its `store` to false if it can't be kept"""


class ResponseWriter(Writer):
    """Writer of a response, which is kept if its body says so."""

    def __init__(
        self,
        body: ResponseBody,
        items: bytes,
        context: bytes,
        keep: Keep,
        *,
        has_logprobs: bool,
    ) -> None:
        """items: JSON array of the input's items. context: JSON array of those before."""
        self._response = _new_response(body)
        self._kept = KeptResponse(self._response, items, context)
        self._keep = keep
        self._has_logprobs = has_logprobs
        tools = body.tools or ()
        self._custom_tools = frozenset(
            tool["name"] for tool in tools if tool.get("type") == "custom"
        )

    @property
    def is_background(self) -> bool:
        """True if the response goes on without its client."""
        return self._response.background

    @property
    def kept(self) -> KeptResponse:
        """The response in its present state."""
        return self._kept

    async def keep(self) -> None:
        """Store the response if its body says so."""
        if self._response.store:
            await self._keep(self._kept)

    def events(self, accepted: completion_pb2.Accepted, request_id: str) -> "_ResponseEvents":
        return _ResponseEvents(self._began(accepted), self._items(), self.keep)

    async def answer(self, output: OutputCollector, *, is_large: bool) -> bytes:
        if is_large:
            await asyncio.to_thread(self._complete, output)
        else:
            self._complete(output)
        await self.keep()
        if is_large:
            return await asyncio.to_thread(_encode, self._response)
        return _encode(self._response)

    def whole(self, output: OutputCollector) -> bytes:
        self._complete(output)
        return _encode(self._response)

    def _complete(self, output: OutputCollector) -> None:
        """Complete the response with its whole output."""
        assert output.accepted is not None
        assert output.usage is not None
        items, finished = self._items(), output.finished[0]
        for _ in items.add(output.pending.get(0, ())):
            pass
        for _ in items.close(is_cut=_is_cut(finished)):
            pass
        _end_response(self._began(output.accepted), items.items, finished, output.usage)

    def _began(self, accepted: completion_pb2.Accepted) -> ResponseObject:
        self._response.model, self._response.created_at = accepted.model, int(time.time())
        return self._response

    def _items(self) -> "_Items":
        return _Items(has_logprobs=self._has_logprobs, custom_tools=self._custom_tools)


class _ResponseEvents(EventWriter):
    """Writer of the events of a response, its items and their parts."""

    def __init__(
        self, response: ResponseObject, items: "_Items", keep: Callable[[], Awaitable[None]]
    ) -> None:
        """keep: stores the final response."""
        self.response = response
        self._items = items
        self._keep = keep
        self._finished: completion_pb2.ChoiceFinished | None = None

    def begin(self) -> Iterator[bytes]:
        for kind in ("created", self.response.status):
            yield self._event(kind)

    def output(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        tokens: int,
        usage: types_pb2.Usage | None,
    ) -> Iterator[bytes]:
        if deltas and self.response.status == _QUEUED:
            self.response.status = _IN_PROGRESS
            yield self._event("in_progress")
        yield from self._items.add(deltas)
        if finished is not None:
            self._finished = finished
            yield from self._items.close(is_cut=_is_cut(finished))

    def complete(self, usage: types_pb2.Usage) -> Iterable[bytes]:
        if self._finished is not None:
            _end_response(self.response, self._items.items, self._finished, usage)
        return ()

    def fail(self, error: ServiceError) -> Iterator[bytes]:
        yield from self._items.close(is_cut=True)
        self.response.output = self._items.items
        if error.reason == CANCELLED:
            self.response.status = _CANCELLED
        else:
            fail_response(self.response, error)

    async def end(self) -> bytes:
        """Store the response; return the last event, which tells whether it is kept."""
        if not has_ended(self.response):
            return b""  # the request was aborted
        await self._keep()
        return self._event(self.response.status)

    def _event(self, kind: str) -> bytes:
        return self._items.event(f"response.{kind}", response=self.response)


class _Items:
    """Converts the deltas of an answer to items of the output, and to the events of a stream."""

    def __init__(self, *, has_logprobs: bool, custom_tools: Collection[str]) -> None:
        """custom_tools: names of the tools whose input is text."""
        self.items: list[OutputItem] = []
        """All items, the last of which may be open"""
        self._has_logprobs = has_logprobs
        self._assembler = PartAssembler(custom_tools)
        self._sequence = 0

    def event(self, kind: str, /, **fields: Any) -> bytes:
        """Return a server-sent event with the next number."""
        data = {"type": kind, "sequence_number": self._sequence} | fields
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(data))

    def add(self, deltas: Iterable[completion_pb2.ChoiceDelta]) -> Iterator[bytes]:
        """Yield the events of deltas."""
        for change in self._assembler.add(deltas):
            yield from self._changed(change, _COMPLETED)

    def close(self, *, is_cut: bool) -> Iterator[bytes]:
        """Yield the end of the open item, if there is one. is_cut: whether a limit ended it."""
        for change in self._assembler.close():
            yield from self._changed(change, _INCOMPLETE if is_cut else _COMPLETED)

    def _changed(self, change: Change, last_status: str) -> Iterator[bytes]:
        match change.step:
            case Step.OPENED:
                self.items.append(_item(change.part))
                yield self._item_event("added", change.number)
            case Step.GROWN:
                yield from self._grown(change)
                if change.number < len(self.items) - 1:  # of a call that seemed to have ended
                    _fill(self.items[change.number], change.part.text)
            case Step.CLOSED:
                _fill(self.items[change.number], change.part.text)
                yield from self._closed(change.number)
                self.items[change.number].status = last_status
                yield self._item_event("done", change.number)

    def _grown(self, change: Change) -> Iterator[bytes]:
        number = change.number
        match self.items[number]:
            case MessageOutput() as item:
                if not item.content:
                    item.content = [AnswerText("", [], [])]
                    yield self._part_event("content_part.added", number, part=item.content[0])
                logprobs = logprobs_of(change.deltas) if self._has_logprobs else []
                item.content[0].logprobs += logprobs
                yield self._part_event(
                    "output_text.delta", number, delta=change.text, logprobs=logprobs
                )
            case ReasoningOutput() as item:
                if not item.content:
                    item.content = [AnswerReasoning("")]
                    yield self._part_event("content_part.added", number, part=item.content[0])
                yield self._part_event("reasoning_text.delta", number, delta=change.text)
            case CallOutput():
                yield self._event("function_call_arguments.delta", number, delta=change.text)
            case CustomCallOutput():
                yield self._event("custom_tool_call_input.delta", number, delta=change.text)

    def _closed(self, number: int) -> Iterator[bytes]:
        match self.items[number]:
            case MessageOutput(content=[text]):
                yield self._part_event(
                    "output_text.done", number, text=text.text, logprobs=text.logprobs
                )
                yield self._part_event("content_part.done", number, part=text)
            case ReasoningOutput(content=[text]):
                yield self._part_event("reasoning_text.done", number, text=text.text)
                yield self._part_event("content_part.done", number, part=text)
            case CallOutput() as item:
                arguments, name = item.arguments, item.name
                yield self._event(
                    "function_call_arguments.done", number, arguments=arguments, name=name
                )
            case CustomCallOutput() as item:
                yield self._event("custom_tool_call_input.done", number, input=item.input)

    def _item_event(self, kind: str, number: int) -> bytes:
        item = self.items[number]
        return self.event(f"response.output_item.{kind}", output_index=number, item=item)

    def _part_event(self, kind: str, number: int, **fields: Any) -> bytes:
        """Return an event of the only part of an item."""
        return self._event(kind, number, content_index=0, **fields)

    def _event(self, kind: str, number: int, **fields: Any) -> bytes:
        """Return an event of an item."""
        place = {"item_id": self.items[number].id, "output_index": number}
        return self.event(f"response.{kind}", **place, **fields)


def _item(part: Part) -> OutputItem:
    """Return the item of a part that begins."""
    match part.kind:
        case PartKind.REASONING:
            return ReasoningOutput(_id("rs"), _IN_PROGRESS, [])
        case PartKind.TEXT:
            return MessageOutput(_id("msg"), _IN_PROGRESS, [])
        case PartKind.CUSTOM_CALL:
            return CustomCallOutput(_id("ctc"), part.call_id, part.name, "", _IN_PROGRESS)
        case PartKind.CALL:
            return CallOutput(_id("fc"), part.call_id, part.name, "", _IN_PROGRESS)


def _fill(item: OutputItem, text: str) -> None:
    """Put its whole text into an item that ends."""
    match item:
        case MessageOutput(content=[part]) | ReasoningOutput(content=[part]):
            part.text = text
        case CallOutput():
            item.arguments = text
        case CustomCallOutput():
            item.input = text


def _new_response(body: ResponseBody) -> ResponseObject:
    """Return a response without output and model. One in the background is queued at first."""
    tools = body.tools or []
    form = None if body.text is None else body.text.format
    text = {"type": "text"} if form is None else _without_nulls(msgspec.to_builtins(form))
    effort = None if body.reasoning is None else body.reasoning.effort
    return ResponseObject(
        _id("resp"),
        0,
        _QUEUED if body.background else _IN_PROGRESS,
        "",
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


def _end_response(
    response: ResponseObject,
    output: list[OutputItem],
    finished: completion_pb2.ChoiceFinished,
    usage: types_pb2.Usage,
) -> None:
    """Make a response complete, or incomplete if a limit cut it."""
    response.output = output
    if _is_cut(finished):
        response.status = _INCOMPLETE
        response.incomplete_details = IncompleteDetails("max_output_tokens")
    else:
        response.status = _COMPLETED
        response.completed_at = int(time.time())
    response.usage = ResponseUsage(
        usage.prompt_tokens,
        InputTokens(usage.cached_tokens),
        usage.completion_tokens,
        OutputTokens(usage.reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )


def _is_cut(finished: completion_pb2.ChoiceFinished) -> bool:
    """Return whether a limit of tokens ended an answer."""
    return finished.reason == types_pb2.FINISH_REASON_LENGTH


def fail_response(response: ResponseObject, error: ServiceError) -> None:
    """Make a response failed, with the output that it has."""
    code = "rate_limit_exceeded" if http_status(error.code) == 429 else "server_error"
    response.status = _FAILED
    response.error = ResponseFailure(code, public_message(error))


def has_ended(response: ResponseObject) -> bool:
    """Return whether a response is in its final state."""
    return response.status not in (_QUEUED, _IN_PROGRESS)


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _without_nulls(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
