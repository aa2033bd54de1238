"""Server-sent events of a streamed message, as in Anthropic's Messages API."""

from collections.abc import Callable, Iterable

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.endpoints.chat_stream import ChatStream
from services.http_shim.formats.anthropic.message_responses import (
    BlockEvents,
    MessageUsage,
    event,
    message_error,
    message_usage,
    stop_of,
    whole_message,
)
from services.http_shim.http.exchange import Exchange
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["MessageStream"]


class MessageStream(ChatStream):
    """Events of a message and its blocks."""

    def __init__(
        self,
        collector: OutputCollector,
        identity: str,
        accepted: completion_pb2.Accepted,
        exchange: Exchange,
        name_of: Callable[[str], str],
    ) -> None:
        """`name_of` gives the client's name of a field."""
        super().__init__(collector, accepted, exchange)
        self._name_of = name_of
        self._blocks = BlockEvents()
        usage = MessageUsage(exchange.prompt_tokens, 0)
        self._empty = whole_message(identity, accepted.model, [], None, usage)

    def _started(self) -> Iterable[bytes]:
        return [event("message_start", message=self._empty)]

    def _output(self, delta: completion_pb2.ChoiceDelta) -> Iterable[bytes]:
        return self._blocks.of(delta)

    def _closed(self, finished: completion_pb2.ChoiceFinished) -> Iterable[bytes]:
        return self._blocks.close()

    def _completed(
        self, finished: completion_pb2.ChoiceFinished, usage: types_pb2.Usage
    ) -> Iterable[bytes]:
        reason, sequence = stop_of(finished, has_calls=self._blocks.has_calls)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield event("message_delta", delta=delta, usage=message_usage(usage))
        yield event("message_stop")

    def _failed(self, error: ServiceError) -> Iterable[bytes]:
        error.field = self._name_of(error.field) if error.field else ""
        yield b"event: error\ndata: %b\n\n" % message_error(error, self._exchange.request_id)
