"""ORCA: streams of load reports, by which Envoy and gRPC clients weigh tokenizer services."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc

from services.common.background import keep_running
from services.common.errors import draining_error
from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.load_report import LoadAverage, RequestCounts
from services.tokenizer.model_status import outcomes, running_requests
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.orca.v1 import orca_pb2

__all__ = ["OrcaServicer"]

_SERVICE = "xds.service.orca.v3.OpenRcaService"
_DEFAULT_SECONDS = 5.0
_LEAST_SECONDS = 0.5
_MEASURE_SECONDS = 0.25
_MOST_STREAMS = 256
_FAILURES = frozenset({"data_loss", "internal", "resource_exhausted", "unavailable", "unknown"})
"""Outcomes of requests that failed through no fault of the client"""


class OrcaServicer:
    """The rpc of OpenRcaService. Load is measured only while a stream is open."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._streams = 0
        self._average: LoadAverage | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._is_draining = asyncio.Event()

    def register(self, server: grpc.aio.Server) -> None:
        """Add the service to the server."""
        handler = grpc.unary_stream_rpc_method_handler(
            self.StreamCoreMetrics,
            request_deserializer=orca_pb2.OrcaLoadReportRequest.FromString,
            response_serializer=orca_pb2.OrcaLoadReport.SerializeToString,
        )
        handlers = {"StreamCoreMetrics": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))

    async def StreamCoreMetrics(
        self, request: orca_pb2.OrcaLoadReportRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[orca_pb2.OrcaLoadReport]:
        """Stream reports until the client leaves or the service drains."""
        seconds = _interval(request)
        if self._is_draining.is_set():
            raise draining_error()
        if self._streams >= _MOST_STREAMS:
            raise ServiceError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "TOO_MANY_STREAMS",
                f"{_MOST_STREAMS} streams of load reports are open; close some.",
                retry_seconds=10,
            )
        self._streams += 1
        try:
            average = self._measured()
            while not self._is_draining.is_set():
                yield average.report()
                try:
                    await asyncio.wait_for(self._is_draining.wait(), seconds)
                except TimeoutError:
                    continue
        finally:
            self._streams -= 1
            if not self._streams and self._measuring is not None:
                self._measuring.cancel()
                self._measuring = None

    def drain(self) -> None:
        """End all streams, and refuse new ones."""
        self._is_draining.set()

    def _measured(self) -> LoadAverage:
        """Return the average load. The first call starts a task that keeps it up to date."""
        if self._average is None:
            self._pool.follow_load()
            self._average = LoadAverage(time.monotonic(), _counts(), time.process_time())
        if self._measuring is None:
            self._measuring = keep_running("load_average", partial(self._measure, self._average))
        return self._average

    async def _measure(self, average: LoadAverage) -> None:
        while True:
            await asyncio.sleep(_MEASURE_SECONDS)
            average.add(time.monotonic(), _counts(), time.process_time(), self._pool.loads())


def _interval(request: orca_pb2.OrcaLoadReportRequest) -> float:
    """Return the seconds between two reports. Raises INVALID_ARGUMENT."""
    duration = request.report_interval
    seconds = duration.seconds + duration.nanos / 1e9
    if seconds < 0:
        message = f"report_interval must not be negative, got {seconds:g} s. Use 0 for the default."
        raise invalid("report_interval", message)
    return max(seconds, _LEAST_SECONDS) if seconds else _DEFAULT_SECONDS


def _counts() -> RequestCounts:
    ended = failed = 0
    for outcome, requests in outcomes().items():
        ended += requests
        failed += requests if outcome in _FAILURES else 0
    return RequestCounts(ended + running_requests(), failed)
