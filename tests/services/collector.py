"""OTLP collector that keeps the spans that services send."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2 as service,
)
from opentelemetry.proto.collector.trace.v1 import (
    trace_service_pb2_grpc as service_grpc,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

__all__ = ["Collector", "ReceivedSpan", "running_collector"]


@dataclass(frozen=True, slots=True)
class ReceivedSpan:
    """A span, as the collector received it."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the first span of a trace"""
    is_error: bool
    is_server: bool
    attributes: dict[str, object]


class Collector(service_grpc.TraceServiceServicer):
    """The servicer."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[ReceivedSpan] = []
        self._changed = asyncio.Condition()

    async def Export(
        self, request: service.ExportTraceServiceRequest, context: Any
    ) -> service.ExportTraceServiceResponse:
        async with self._changed:
            for resource in request.resource_spans:
                name = str(_values(resource.resource.attributes)["service.name"])
                spans = (span for scope in resource.scope_spans for span in scope.spans)
                self._spans += [_received(name, span) for span in spans]
            self._changed.notify_all()
        return service.ExportTraceServiceResponse()

    async def trace(
        self, trace_id: str, *, until: Callable[[dict[str, ReceivedSpan]], bool]
    ) -> dict[str, ReceivedSpan]:
        """Wait until the spans of a trace, by service, satisfy the condition."""

        def found() -> dict[str, ReceivedSpan]:
            return {span.service: span for span in self._spans if span.trace_id == trace_id}

        async with self._changed:
            await self._changed.wait_for(lambda: until(found()))
        return found()


@asynccontextmanager
async def running_collector() -> AsyncIterator[Collector]:
    """Serve a collector on a free port of loopback."""
    collector, server = Collector(), grpc.aio.server()
    service_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    collector.endpoint = f"http://127.0.0.1:{port}"
    try:
        yield collector
    finally:
        await server.stop(None)


def _received(service_name: str, span: trace_pb2.Span) -> ReceivedSpan:
    return ReceivedSpan(
        service=service_name,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        is_error=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        is_server=span.kind == trace_pb2.Span.SPAN_KIND_SERVER,
        attributes=_values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, object]:
    pairs: list[KeyValue] = list(attributes)
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> object:
    if value.HasField("array_value"):
        return [_value(each) for each in value.array_value.values]
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
