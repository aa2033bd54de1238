"""Span of one request, from its arrival to its last token."""

import logging

from services.common import tracing
from services.common.errors import internal_error
from services.common.failures import failure
from services.common.logging import traceparent
from services.engine.messages import RequestDone
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1.types_pb2 import FinishReason

__all__ = ["RequestSpan"]

_LOG = logging.getLogger("engine")
_SERVICE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name


class RequestSpan:
    """Span of a request, and the facts about its sequences that it collects."""

    __slots__ = ("_finish_reasons", "_span", "mask_seconds")

    def __init__(self, model: str, request_id: str, parent: str) -> None:
        """Start the span below `parent`, and make it the context of the task's calls and logs."""
        self._span = tracing.start(f"{_SERVICE}/Generate", parent, request_id)
        self._span.set({"gen_ai.operation.name": "text_completion", "gen_ai.request.model": model})
        self._finish_reasons: list[str] = []
        self.mask_seconds = 0.0
        """Seconds that masks took, summed over the sequences"""
        traceparent.set(self._span.traceparent)

    @property
    def traceparent(self) -> str:
        """Trace context for the log."""
        return self._span.traceparent

    def on_finished(self, finished: engine_pb2.SequenceFinished) -> None:
        """Record the end of a sequence."""
        name = FinishReason.Name(finished.reason)
        self._finish_reasons.append(name.removeprefix("FINISH_REASON_").lower())

    def complete(self, done: RequestDone, outcome: str) -> None:
        """End the span of a request whose sequences have ended."""
        if self._span.is_recording:
            self._span.set(
                {
                    "tokenwire.outcome": outcome,
                    "gen_ai.response.finish_reasons": self._finish_reasons,
                    "gen_ai.usage.input_tokens": done.prompt_tokens,
                    "gen_ai.usage.output_tokens": done.completion_tokens,
                    "gen_ai.usage.cache_read.input_tokens": done.cached_tokens,
                    "tokenwire.queue_seconds": done.queue_seconds,
                    "tokenwire.prefill_seconds": done.prefill_seconds,
                    "tokenwire.decode_seconds": done.decode_seconds,
                    "tokenwire.mask_seconds": self.mask_seconds,
                }
            )
        self._span.end()

    def cancel(self) -> None:
        """End the span of a request whose client has left."""
        self._span.set({"tokenwire.outcome": "cancelled"})
        self._span.end()

    def fail(self, error: BaseException) -> None:
        """End the span of a request that is refused or fails, or whose call is cancelled."""
        if not isinstance(error, Exception):
            self.cancel()
            return
        known = error if isinstance(error, ServiceError) else internal_error()
        self._span.fail(**failure(_LOG, known))
        self._span.end()
