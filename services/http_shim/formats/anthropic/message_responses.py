"""JSON of answers of the Messages API, whole and as events of a stream."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from services.http_shim.errors import http_status, public_message
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "THREAD_NOT_FOUND",
    "AnswerBlock",
    "BlockEvents",
    "ErrorDetail",
    "MessageAnswer",
    "MessageError",
    "MessageUsage",
    "event",
    "message_error",
    "message_usage",
    "other_message_error",
    "stop_of",
    "whole_message",
]

_encode = msgspec.json.Encoder().encode
_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_EMPTY_OBJECT = Raw(b"{}")
THREAD_NOT_FOUND = "THREAD_NOT_FOUND"
"""Reason for which Anthropic's clients send the whole conversation again"""


class MessageUsage(Struct):
    """Tokens of an answer; `input_tokens` are those that were not cached."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class AnswerText(Struct, tag_field="type", tag="text"):
    """Text of an answer."""

    text: str


class AnswerThinking(Struct, tag_field="type", tag="thinking"):
    """Reasoning of an answer, without a signature."""

    thinking: str
    signature: str = ""


class AnswerToolUse(Struct, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: Raw


AnswerBlock: TypeAlias = AnswerText | AnswerThinking | AnswerToolUse


class MessageAnswer(Struct):
    """A whole answer."""

    id: str
    type: str
    role: str
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class ErrorCode(Struct):
    """The code of a failure for which clients have a remedy."""

    error_code: str


class ErrorDetail(Struct):
    """The failure."""

    type: str
    message: str
    details: ErrorCode | UnsetType = UNSET


class MessageError(Struct, tag_field="type", tag="error"):
    """The JSON body of an error."""

    error: ErrorDetail
    request_id: str


def whole_message(
    identity: str,
    model: str,
    deltas: Sequence[completion_pb2.ChoiceDelta],
    finished: completion_pb2.ChoiceFinished | None,
    usage: MessageUsage,
) -> MessageAnswer:
    """Return an answer; it may be the empty one that begins a stream."""
    content = list(_blocks(deltas))
    has_calls = any(isinstance(block, AnswerToolUse) for block in content)
    reason, sequence = (None, None) if finished is None else stop_of(finished, has_calls=has_calls)
    return MessageAnswer(identity, "message", "assistant", model, content, reason, sequence, usage)


def stop_of(finished: completion_pb2.ChoiceFinished, *, has_calls: bool) -> tuple[str, str | None]:
    """Return stop_reason and stop_sequence of a message with calls of tools or without."""
    if has_calls and finished.reason != types_pb2.FINISH_REASON_LENGTH:
        return "tool_use", None
    if finished.match.WhichOneof("match") == "stop_string":
        return "stop_sequence", finished.match.stop_string
    is_cut = finished.reason == types_pb2.FINISH_REASON_LENGTH
    return "max_tokens" if is_cut else "end_turn", None


def message_usage(usage: types_pb2.Usage) -> MessageUsage:
    """Return the final usage."""
    return MessageUsage(
        usage.prompt_tokens - usage.cached_tokens, usage.completion_tokens, usage.cached_tokens
    )


def message_error(error: ServiceError, request_id: str) -> bytes:
    """Return the JSON body of an error, whose message names the field at fault."""
    message = public_message(error)
    if error.field and error.field not in message:
        message = f"{error.field}: {message}"
    code = error.reason.lower() if error.reason == THREAD_NOT_FOUND else None
    return other_message_error(http_status(error.code), message, request_id, code)


def other_message_error(
    status: int, message: str, request_id: str, code: str | None = None
) -> bytes:
    """Return the JSON body of a failure with an HTTP status. code: one of Anthropic's."""
    kind = _ERRORS.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    details = UNSET if code is None else ErrorCode(code)
    return _encode(MessageError(ErrorDetail(kind, message, details), request_id))


def event(name: str, **fields: Any) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name} | fields))


def _blocks(deltas: Iterable[completion_pb2.ChoiceDelta]) -> Iterator[AnswerBlock]:
    reasoning = "".join(delta.reasoning for delta in deltas)
    if reasoning:
        yield AnswerThinking(reasoning)
    if text := "".join(delta.text for delta in deltas):
        yield AnswerText(text)
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for part in (call for delta in deltas for call in delta.tool_calls):
        _, _, arguments = calls.setdefault(part.index, (part.id, part.name, []))
        arguments.append(part.arguments_json)
    for index in sorted(calls):
        identity, name, arguments = calls[index]
        yield AnswerToolUse(identity, name, _object("".join(arguments)))


def _object(text: str) -> Raw:
    """Return the JSON object that a model wrote; what is no object stands in one."""
    try:
        if isinstance(msgspec.json.decode(text), dict):
            return Raw(text.encode())
    except msgspec.DecodeError:
        pass
    return Raw(_encode({"arguments": text})) if text else _EMPTY_OBJECT


class BlockEvents:
    """Converts the deltas of a message to the events of its blocks, which follow each other."""

    def __init__(self) -> None:
        self._index = -1
        """Of the open block, or of the last one"""
        self._open: tuple[str, int] | None = None
        """Kind of the open block, and for a tool call its index among the calls"""
        self.has_calls = False
        """True if a block was the call of a tool"""

    def of(self, delta: completion_pb2.ChoiceDelta) -> Iterator[bytes]:
        """Yield the events of a delta."""
        if delta.reasoning:
            yield from self._opened(("thinking", 0), AnswerThinking(""))
            yield self._delta(type="thinking_delta", thinking=delta.reasoning)
        if delta.text:
            yield from self._opened(("text", 0), AnswerText(""))
            yield self._delta(type="text_delta", text=delta.text)
        for call in delta.tool_calls:
            self.has_calls = True
            block = AnswerToolUse(call.id, call.name, _EMPTY_OBJECT)
            yield from self._opened(("tool_use", call.index), block)
            if call.arguments_json:
                yield self._delta(type="input_json_delta", partial_json=call.arguments_json)

    def close(self) -> Iterator[bytes]:
        """Yield the end of the open block, if there is one."""
        if self._open is not None:
            self._open = None
            yield event("content_block_stop", index=self._index)

    def _opened(self, kind: tuple[str, int], block: AnswerBlock) -> Iterator[bytes]:
        if kind == self._open:
            return
        yield from self.close()
        self._index += 1
        self._open = kind
        yield event("content_block_start", index=self._index, content_block=block)

    def _delta(self, **fields: str) -> bytes:
        return event("content_block_delta", index=self._index, delta=fields)
