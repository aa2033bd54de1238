"""Writing of messages, whole and as events of a stream."""

import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.messages.types import (
    AnswerBlock,
    AnswerText,
    AnswerThinking,
    AnswerToolUse,
    ErrorCode,
    ErrorDetail,
    MessageAnswer,
    MessageError,
    MessageUsage,
)
from services.http_shim.dialects.parts import (
    Change,
    Part,
    PartAssembler,
    PartKind,
    Step,
    arguments_object,
    parts_of,
)
from services.http_shim.dialects.writer import EventWriter, Writer
from services.http_shim.errors import ErrorForm, http_status, public_message
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["MESSAGE_ERRORS", "THREAD_NOT_FOUND", "MessageWriter", "message_error"]

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
THREAD_NOT_FOUND = "THREAD_NOT_FOUND"
"""Reason for which Anthropic's clients send the whole conversation again"""


class MessageWriter(Writer):
    """Writer of a message."""

    def events(self, accepted: completion_pb2.Accepted, request_id: str) -> "_MessageEvents":
        return _MessageEvents(accepted, request_id)

    def whole(self, output: OutputCollector) -> bytes:
        assert output.accepted is not None
        assert output.usage is not None
        parts, finished = parts_of(output.pending.get(0, ())), output.finished[0]
        reason, sequence = _stop_of(finished, has_calls=_has_calls(parts))
        message = _message(output.accepted, _message_usage(output.usage))
        message.content = [_block(part) for part in parts]
        message.stop_reason, message.stop_sequence = reason, sequence
        return _encode(message)


class _MessageEvents(EventWriter):
    """Writer of the events of a message and its blocks."""

    def __init__(self, accepted: completion_pb2.Accepted, request_id: str) -> None:
        usage = MessageUsage(sum(len(prompt.ids) for prompt in accepted.prompts), 0)
        self._message = _message(accepted, usage)
        self._request_id = request_id
        self._assembler = PartAssembler(keeps_text=False)
        self._finished: completion_pb2.ChoiceFinished | None = None

    def begin(self) -> Iterable[bytes]:
        return [_event("message_start", message=self._message)]

    def output(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        tokens: int,
        usage: types_pb2.Usage | None,
    ) -> Iterator[bytes]:
        yield from map(self._block_event, self._assembler.add(deltas))
        if finished is not None:
            self._finished = finished
            yield from map(self._block_event, self._assembler.close())

    def complete(self, usage: types_pb2.Usage) -> Iterator[bytes]:
        if self._finished is None:
            return  # the request was aborted
        reason, sequence = _stop_of(self._finished, has_calls=_has_calls(self._assembler.parts))
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=delta, usage=_message_usage(usage))
        yield _event("message_stop")

    def fail(self, error: ServiceError) -> Iterable[bytes]:
        return [b"event: error\ndata: %b\n\n" % message_error(error, self._request_id)]

    def _block_event(self, change: Change) -> bytes:
        """Return the event of a step of a block."""
        part, text, index = change.part, change.text, change.number
        match change.step, part.kind:
            case Step.OPENED, _:
                empty = _block(Part(part.kind, part.index, part.call_id, part.name))
                return _event("content_block_start", index=index, content_block=empty)
            case Step.CLOSED, _:
                return _event("content_block_stop", index=index)
            case _, PartKind.REASONING:
                delta = {"type": "thinking_delta", "thinking": text}
            case _, PartKind.TEXT:
                delta = {"type": "text_delta", "text": text}
            case _:
                delta = {"type": "input_json_delta", "partial_json": text}
        return _event("content_block_delta", index=index, delta=delta)


def _message(accepted: completion_pb2.Accepted, usage: MessageUsage) -> MessageAnswer:
    """Return a message without content."""
    identity = f"msg_{uuid.uuid4().hex}"
    return MessageAnswer(identity, "message", "assistant", accepted.model, [], None, None, usage)


def _block(part: Part) -> AnswerBlock:
    match part.kind:
        case PartKind.REASONING:
            return AnswerThinking(part.text)
        case PartKind.TEXT:
            return AnswerText(part.text)
    return AnswerToolUse(part.call_id, part.name, arguments_object(part.text))


def _has_calls(parts: Iterable[Part]) -> bool:
    return any(part.kind is PartKind.CALL for part in parts)


def _stop_of(finished: completion_pb2.ChoiceFinished, *, has_calls: bool) -> tuple[str, str | None]:
    """Return stop_reason and stop_sequence of a message with calls of tools or without."""
    if has_calls and finished.reason != types_pb2.FINISH_REASON_LENGTH:
        return "tool_use", None
    if finished.match.WhichOneof("match") == "stop_string":
        return "stop_sequence", finished.match.stop_string
    is_cut = finished.reason == types_pb2.FINISH_REASON_LENGTH
    return "max_tokens" if is_cut else "end_turn", None


def _message_usage(usage: types_pb2.Usage) -> MessageUsage:
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
    return _other_error(http_status(error.code), message, request_id, code)


def _other_error(status: int, message: str, request_id: str, code: str | None = None) -> bytes:
    """Return the JSON body of a failure with an HTTP status. code: one of Anthropic's."""
    kind = _ERRORS.get(status) or ("api_error" if status >= 500 else "invalid_request_error")
    details = UNSET if code is None else ErrorCode(code)
    return _encode(MessageError(ErrorDetail(kind, message, details), request_id))


MESSAGE_ERRORS = ErrorForm(message_error, _other_error)


def _event(name: str, **fields: Any) -> bytes:
    """Return a server-sent event."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode({"type": name} | fields))
