"""Writing of Ollama's answers, whole and as lines of a stream."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.dialects.content_logprobs import (
    ContentLogprob,
    TokenLogprob,
    finite,
    logprobs_of,
)
from services.http_shim.dialects.ollama.types import (
    OllamaAnswer,
    OllamaAnswerCall,
    OllamaAnswerFunction,
    OllamaAnswerMessage,
    OllamaChatAnswer,
    OllamaError,
    OllamaGenerateAnswer,
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
from services.http_shim.errors import ErrorForm, public_message
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["OLLAMA_ERRORS", "ChatForm", "Form", "GenerateForm", "OllamaWriter", "now"]

_encode = msgspec.json.Encoder().encode


def now() -> str:
    """Return the time in RFC 3339."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


class Form(ABC):
    """Form of an answer."""

    returns_context = False

    @abstractmethod
    def line(self, model: str, text: str = "", thinking: str = "") -> OllamaAnswer:
        """Return a line, or a whole answer, with a text and the reasoning before it."""

    def add_calls(self, line: OllamaAnswer, calls: Sequence[Part]) -> None:  # noqa: B027
        """Add calls to a line; a prompt's answer has none."""


class ChatForm(Form):
    """Form of /api/chat."""

    def line(self, model: str, text: str = "", thinking: str = "") -> OllamaChatAnswer:
        message = OllamaAnswerMessage("assistant", text)
        if thinking:
            message.thinking = thinking
        return OllamaChatAnswer(model, now(), message=message)

    def add_calls(self, line: OllamaAnswer, calls: Sequence[Part]) -> None:
        assert isinstance(line, OllamaChatAnswer)
        line.message.tool_calls = [_call(part) for part in calls]


class GenerateForm(Form):
    """Form of /api/generate."""

    def __init__(self, *, returns_context: bool) -> None:
        """returns_context: whether the last line has the ids of prompt and answer."""
        self.returns_context = returns_context

    def line(self, model: str, text: str = "", thinking: str = "") -> OllamaGenerateAnswer:
        line = OllamaGenerateAnswer(model, now(), response=text)
        if thinking:
            line.thinking = thinking
        return line


class OllamaWriter(Writer):
    """Writer of an answer."""

    def __init__(self, model: str, form: Form, *, logprobs: bool) -> None:
        """model: the name that the client wrote."""
        self._model = model
        self._form = form
        self._logprobs = logprobs
        self._began = time.monotonic_ns()
        self.waits_for_load = False
        """True if the request found its model not in memory"""

    def events(self, accepted: completion_pb2.Accepted, request_id: str) -> "_Lines":
        return _Lines(self, accepted)

    def whole(self, output: OutputCollector) -> bytes:
        assert output.accepted is not None
        assert output.usage is not None
        deltas = output.pending.get(0, ())
        parts = parts_of(deltas)
        text, thinking = _text(parts, PartKind.TEXT), _text(parts, PartKind.REASONING)
        answer = self._form.line(self._model, text, thinking)
        if calls := [part for part in parts if part.kind is PartKind.CALL]:
            self._form.add_calls(answer, calls)
        if self._logprobs:
            answer.logprobs = _logprobs_of(deltas)
        ids = [*output.accepted.prompts[0].ids, *_ids_of(deltas)] if self.returns_context else []
        self.finish(answer, output.finished[0], output.usage, ids)
        return _encode(answer)

    def empty(self, reason: str) -> bytes:
        """Return the answer to a request without input. reason: load or unload."""
        answer = self.line()
        answer.done, answer.done_reason = True, reason
        answer.total_duration = answer.load_duration = time.monotonic_ns() - self._began
        return _encode(answer)

    @property
    def returns_context(self) -> bool:
        """True if the answer has the ids of the prompt and of itself."""
        return self._form.returns_context

    def omit_context(self) -> None:
        """Leave out the ids: they continue conversations alone, and this is none."""
        self._form.returns_context = False

    def line(self, text: str = "", thinking: str = "") -> OllamaAnswer:
        """Return a line of the stream."""
        return self._form.line(self._model, text, thinking)

    def call_line(self, calls: Sequence[Part]) -> OllamaAnswer:
        """Return a line with calls."""
        line = self.line()
        self._form.add_calls(line, calls)
        return line

    def logprobs_of(self, deltas: Sequence[completion_pb2.ChoiceDelta]) -> list[ContentLogprob]:
        """Return the scores of the tokens of deltas; none unless they are wanted."""
        return _logprobs_of(deltas) if self._logprobs else []

    def finish(
        self,
        answer: OllamaAnswer,
        finished: completion_pb2.ChoiceFinished,
        usage: types_pb2.Usage,
        context: Sequence[int],
    ) -> None:
        """Add what the end of a request tells."""
        is_cut = finished.reason == types_pb2.FINISH_REASON_LENGTH
        answer.done, answer.done_reason = True, "length" if is_cut else "stop"
        answer.total_duration = time.monotonic_ns() - self._began
        answer.load_duration = 0
        if self.waits_for_load:  # the rest of the time is that of the engine
            engine = usage.queue_seconds + usage.prefill_seconds + usage.decode_seconds
            answer.load_duration = max(0, answer.total_duration - _nanoseconds(engine))
        answer.prompt_eval_count = usage.prompt_tokens
        answer.prompt_eval_duration = _nanoseconds(usage.prefill_seconds)
        answer.eval_count = usage.completion_tokens
        answer.eval_duration = _nanoseconds(usage.decode_seconds)
        if isinstance(answer, OllamaGenerateAnswer) and self.returns_context:
            answer.context = list(context)


class _Lines(EventWriter):
    """Writer of the lines of a streamed answer."""

    media_type = b"application/x-ndjson"

    def __init__(self, writer: OllamaWriter, accepted: completion_pb2.Accepted) -> None:
        self._writer = writer
        self._assembler = PartAssembler()
        prompts = accepted.prompts if writer.returns_context else ()
        self._ids = [token for prompt in prompts for token in prompt.ids]
        self._finished: completion_pb2.ChoiceFinished | None = None

    def output(
        self,
        index: int,
        deltas: Sequence[completion_pb2.ChoiceDelta],
        finished: completion_pb2.ChoiceFinished | None,
        tokens: int,
        usage: types_pb2.Usage | None,
    ) -> Iterator[bytes]:
        if self._writer.returns_context:
            self._ids += _ids_of(deltas)
        changes = self._assembler.add(deltas)
        if finished is not None:
            self._finished = finished
            changes += self._assembler.close()
        lines = [line for change in changes if (line := self._line(change)) is not None]
        if finished is not None and (calls := self._calls()):
            lines.append(self._writer.call_line(calls))
        if scores := self._writer.logprobs_of(deltas):
            if not lines:
                lines.append(self._writer.line())
            lines[0].logprobs = scores
        yield from map(_line, lines)

    def complete(self, usage: types_pb2.Usage) -> Iterator[bytes]:
        if self._finished is None:
            return  # the request was aborted
        last = self._writer.line()
        self._writer.finish(last, self._finished, usage, self._ids)
        yield _line(last)

    def fail(self, error: ServiceError) -> Iterable[bytes]:
        return [_service_error(error, "") + b"\n"]

    def ping(self) -> bytes:
        """Return a line without text, because JSON has no comments."""
        return _line(self._writer.line())

    def progress(self, text: str) -> bytes:
        return self.ping()

    def _line(self, change: Change) -> OllamaAnswer | None:
        part = change.part
        if part.kind is PartKind.CALL:
            return None
        part.pieces.clear()  # they are sent now
        if change.step is not Step.GROWN:
            return None
        text = change.text
        if part.kind is PartKind.REASONING:
            return self._writer.line(thinking=text)
        return self._writer.line(text)

    def _calls(self) -> list[Part]:
        """Return the calls; their arguments are objects, so they are sent once they are whole."""
        return [part for part in self._assembler.parts if part.kind is PartKind.CALL]


def _line(value: OllamaAnswer) -> bytes:
    return _encode(value) + b"\n"


def _call(part: Part) -> OllamaAnswerCall:
    arguments = arguments_object(part.text)
    return OllamaAnswerCall(part.call_id, OllamaAnswerFunction(part.index, part.name, arguments))


def _text(parts: Iterable[Part], kind: PartKind) -> str:
    return "".join([part.text for part in parts if part.kind is kind])


def _ids_of(deltas: Iterable[completion_pb2.ChoiceDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _logprobs_of(deltas: Sequence[completion_pb2.ChoiceDelta]) -> list[ContentLogprob]:
    """Return an entry for each token; in the answer to a prompt, tokens have texts, not bytes."""
    if any(delta.token_texts for delta in deltas):
        return [entry for delta in deltas for entry in _prompt_logprobs(delta)]
    return logprobs_of(deltas)


def _prompt_logprobs(delta: completion_pb2.ChoiceDelta) -> Iterator[ContentLogprob]:
    columns, width = delta.tokens, delta.tokens.top_width
    tops = list(map(_token, delta.top_texts, columns.top_logprobs))
    for i, (text, logprob) in enumerate(zip(delta.token_texts, columns.logprobs, strict=True)):
        own = _token(text, logprob)
        top = tops[i * width : (i + 1) * width]
        yield ContentLogprob(own.token, own.logprob, own.bytes, top)


def _token(text: str, logprob: float) -> TokenLogprob:
    return TokenLogprob(text, finite(logprob), list(text.encode()))


def _service_error(error: ServiceError, request_id: str) -> bytes:
    """Return the JSON body of an error, whose sentence names the field at fault."""
    message = public_message(error)
    if error.field and error.field not in message:
        message = f"{error.field}: {message}"
    return _encode(OllamaError(message))


def _other_error(status: int, message: str, request_id: str) -> bytes:
    return _encode(OllamaError(message))


OLLAMA_ERRORS = ErrorForm(_service_error, _other_error)
