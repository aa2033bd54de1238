"""Forms of an answer: what an API makes of the output of a request."""

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable

import grpc
import msgspec

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.backends.submission import Submission
from services.http_shim.endpoints.background_responses import TOO_LARGE
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.endpoints.message_stream import MessageStream
from services.http_shim.endpoints.response_stream import CANCELLED, ResponseStream
from services.http_shim.endpoints.stream_sender import Events
from services.http_shim.formats.anthropic.message_responses import message_usage, whole_message
from services.http_shim.formats.openai_responses.response_objects import (
    ItemEvents,
    ResponseObject,
    begun_response,
    end_response,
    fail_response,
    output_of,
)
from services.http_shim.formats.openai_responses.response_requests import PreparedResponse
from services.http_shim.formats.request_bodies import StreamOptions
from services.http_shim.formats.responses import (
    ChoiceFormatter,
    Envelope,
    prompt_logprobs_of,
    usage_of,
)
from services.http_shim.http.exchange import Exchange
from services.http_shim.jobs.jobs import InnerJobs
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = [
    "AnswerFormat",
    "BackgroundFormat",
    "ChoicesFormat",
    "MessageFormat",
    "ResponseFormat",
]

_LOG = logging.getLogger("responses")


class AnswerFormat(ABC):
    """The form that a request asks for."""

    @abstractmethod
    def events(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        exchange: Exchange,
        name_of: Callable[[str], str],
    ) -> Events:
        """Return the events of a stream; `name_of` gives the client's name of a field."""

    async def begin(self, events: Events) -> None:  # noqa: B027 - most have nothing to prepare
        """Prepare the stream of these events, before its first byte. Raises ServiceError."""

    @abstractmethod
    def whole(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        usage: types_pb2.Usage,
    ) -> bytes:
        """Return the answer as JSON."""

    async def answer(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        usage: types_pb2.Usage,
        *,
        is_large: bool,
    ) -> bytes:
        """Return the answer as JSON; a large one is put together in a thread."""
        if is_large:
            return await asyncio.to_thread(self.whole, collector, accepted, usage)
        return self.whole(collector, accepted, usage)

    def left(self, collector: OutputCollector, submission: Submission) -> Callable[[], None]:
        """Return what ends the request when its client leaves."""
        return collector.abandon

    @abstractmethod
    def tokens_in(self, deltas: list[completion_pb2.ChoiceDelta]) -> int:
        """Return the number of generated tokens."""


class ChoicesFormat(AnswerFormat):
    """Choices, as in OpenAI's completions and chats."""

    def __init__(self, formatter: ChoiceFormatter, options: StreamOptions | None) -> None:
        self._formatter = formatter
        self._options = options

    def events(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        exchange: Exchange,
        name_of: Callable[[str], str],
    ) -> Events:
        envelope = self._envelope(accepted)
        return EventStream(collector, self._formatter, self._options, envelope, exchange, name_of)

    def whole(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        usage: types_pb2.Usage,
    ) -> bytes:
        formatter = self._formatter
        choices = [
            formatter.choice(
                index,
                collector.pending.get(index, []),
                collector.finished[index],
                accepted.prompts[index // formatter.choices_per_prompt],
            )
            for index in sorted(collector.finished)
        ]
        more = None
        if formatter.prompt_logprobs:
            runs = collector.prompt_logprobs
            prompts = [prompt_logprobs_of(runs.get(i, ())) for i in range(len(accepted.prompts))]
            more = formatter.add_prompt_logprobs(choices, prompts)
        return self._envelope(accepted).whole(choices, usage_of(usage), more)

    def tokens_in(self, deltas: list[completion_pb2.ChoiceDelta]) -> int:
        return self._formatter.tokens_in(deltas)

    def _envelope(self, accepted: completion_pb2.Accepted) -> Envelope:
        identity = f"{self._formatter.id_prefix}-{uuid.uuid4().hex}"
        return Envelope(identity, int(time.time()), accepted, self._formatter)


class MessageFormat(AnswerFormat):
    """One message, as in Anthropic's Messages API."""

    def events(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        exchange: Exchange,
        name_of: Callable[[str], str],
    ) -> Events:
        return MessageStream(collector, _message_id(), accepted, exchange, name_of)

    def whole(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        usage: types_pb2.Usage,
    ) -> bytes:
        deltas, finished = collector.pending.get(0, []), collector.finished[0]
        total = message_usage(usage)
        return msgspec.json.encode(
            whole_message(_message_id(), accepted.model, deltas, finished, total)
        )

    def tokens_in(self, deltas: list[completion_pb2.ChoiceDelta]) -> int:
        return sum(len(delta.token_ids) for delta in deltas)


class ResponseFormat(AnswerFormat):
    """A response, as in OpenAI's Responses API, which is kept if its body says so."""

    def __init__(
        self, prepared: PreparedResponse, jobs: InnerJobs, context: jobs_pb2.RequestContext
    ) -> None:
        """context: on whose behalf the response is kept."""
        self._prepared = prepared
        self._jobs = jobs
        self._context = context

    def events(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        exchange: Exchange,
        name_of: Callable[[str], str],
    ) -> ResponseStream:
        items = ItemEvents(
            has_logprobs=self._prepared.has_logprobs, custom_tools=self._prepared.custom_tools
        )
        response = self._begun(accepted)
        return ResponseStream(collector, response, accepted, exchange, self._keep, items)

    async def answer(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        usage: types_pb2.Usage,
        *,
        is_large: bool,
    ) -> bytes:
        if is_large:
            response = await asyncio.to_thread(self._ended, collector, accepted, usage)
        else:
            response = self._ended(collector, accepted, usage)
        await self._keep(response)
        return msgspec.json.encode(response)

    def whole(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        usage: types_pb2.Usage,
    ) -> bytes:
        return msgspec.json.encode(self._ended(collector, accepted, usage))

    def _ended(
        self,
        collector: OutputCollector,
        accepted: completion_pb2.Accepted,
        usage: types_pb2.Usage,
    ) -> ResponseObject:
        deltas, finished = collector.pending.get(0, []), collector.finished[0]
        output = output_of(
            deltas,
            finished,
            has_logprobs=self._prepared.has_logprobs,
            custom_tools=self._prepared.custom_tools,
        )
        response = self._begun(accepted)
        end_response(response, output, finished, usage, int(time.time()))
        return response

    def tokens_in(self, deltas: list[completion_pb2.ChoiceDelta]) -> int:
        return sum(len(delta.token_ids) for delta in deltas)

    def _begun(self, accepted: completion_pb2.Accepted) -> ResponseObject:
        identity = f"resp_{uuid.uuid4().hex}"
        return begun_response(identity, int(time.time()), accepted.model, self._prepared)

    async def _keep(self, response: ResponseObject) -> None:
        if not response.store:
            return
        try:
            response.store = await self._put(response)
        except ServiceError as error:  # the answer itself is complete
            _LOG.warning("a response could not be kept: %r", error)
            response.store = False

    async def _put(self, response: ResponseObject, *, is_running: bool = False) -> bool:
        asked, output = self._prepared.original_input, msgspec.json.encode(response.output)
        stored = jobs_pb2.StoredResponse(
            id=response.id,
            response_json=msgspec.json.encode(response),
            input_json=asked,
            context_json=_joined(self._prepared.original_context, asked, output),
            is_running=is_running,
        )
        request = jobs_pb2.PutResponseRequest(context=self._context, response=stored)
        return await self._jobs.keep(request)


class BackgroundFormat(ResponseFormat):
    """A response that the jobs service runs in the background, as a stream of events to itself."""

    async def begin(self, events: Events) -> None:
        """Keep the response as one that runs.

        Raises INVALID_ARGUMENT if it is too large to be kept, and UNAVAILABLE if the store fails.
        """
        assert isinstance(events, ResponseStream)
        if not await self._put(events.response, is_running=True):
            raise invalid("background", TOO_LARGE)

    def left(self, collector: OutputCollector, submission: Submission) -> Callable[[], None]:
        """Return what ends the response with the output that it has."""

        def cancel() -> None:
            if collector.is_open():
                submission.cancel()
                message = "The response was cancelled."
                collector.on_error(ServiceError(grpc.StatusCode.CANCELLED, CANCELLED, message))

        return cancel

    async def _keep(self, response: ResponseObject) -> None:
        if not await self._put(response):
            code, message = grpc.StatusCode.INTERNAL, "The response is too large to be kept."
            fail_response(response, [], ServiceError(code, "NOT_KEPT", message))
            await self._put(response)


def _joined(*arrays: bytes) -> bytes:
    """Return one JSON array of all items of JSON arrays."""
    return b"[%b]" % b",".join(inner for array in arrays if (inner := array[1:-1]))


def _message_id() -> str:
    return f"msg_{uuid.uuid4().hex}"
