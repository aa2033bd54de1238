"""OpenTelemetry's SDK as the exporter of spans. Only `tracing` imports it, with an endpoint."""

import logging
import threading
import time
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.common.span import Attributes, Span

__all__ = ["SpanExporter"]

_LOG = logging.getLogger("traces")
_FLUSH_SECONDS = 2.0
"""Longest wait for the collector at the end of the process"""
_WARNING_SECONDS = 60.0
"""Shortest time between two warnings of the SDK in the log"""
_CONTEXT = TraceContextTextMapPropagator()


class SpanExporter:
    """Exporter that starts spans, and sends ended spans to a collector in a thread of the SDK."""

    def __init__(self, service: str, endpoint: str) -> None:
        """The sampler, the queue's size and other limits come from OpenTelemetry's variables."""
        _log_few_warnings()
        name, release = f"tokenwire-{service.replace('_', '-')}", version("tokenwire")
        self._exporter = OTLPSpanExporter(endpoint=endpoint)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": name, "service.version": release}),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("tokenwire", release)

    def start(self, name: str, parent: str) -> Span:
        """Start a span. parent: traceparent of its parent; "" = the span begins a trace."""
        return _ExportedSpan(self._tracer, name, parent)

    def close(self) -> None:
        """Send the remaining spans, unless the collector takes too long."""
        giving_up = threading.Timer(_FLUSH_SECONDS, self._exporter.shutdown)
        giving_up.daemon = True
        giving_up.start()
        self._provider.shutdown()
        giving_up.cancel()


class _ExportedSpan(Span):
    """A span of the SDK. It records nothing if the sampler left it out."""

    __slots__ = ("_span", "is_recording")

    def __init__(self, tracer: Tracer, name: str, parent: str) -> None:
        context = _CONTEXT.extract({"traceparent": parent})
        self._span = tracer.start_span(name, context, SpanKind.SERVER)
        self.is_recording = self._span.is_recording()
        carrier = {"traceparent": parent}
        _CONTEXT.inject(carrier, set_span_in_context(self._span, context))
        super().__init__(carrier["traceparent"])

    def set(self, attributes: Attributes) -> None:
        for key, value in attributes.items():
            if value != "":
                self._span.set_attribute(key, value)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def fail(self, reason: str, error: str = "", field: str = "") -> None:
        self._span.set_attribute("error.type", reason)
        if field:
            self._span.set_attribute("tokenwire.field", field)
        self._span.set_status(Status(StatusCode.ERROR, error or None))

    def end(self) -> None:
        self._span.end()


class _FewWarnings(logging.Handler):
    """Handler that logs one record a minute: a lost collector causes one for each batch."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._silent_until = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + _WARNING_SECONDS
            _LOG.warning("the export of traces fails: %s", record.getMessage())


def _log_few_warnings() -> None:
    sdk = logging.getLogger("opentelemetry")
    sdk.propagate = False
    sdk.handlers = [_FewWarnings()]
