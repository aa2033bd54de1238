"""ORCA: a balancer learns how full the engines are, and is told when the service stops."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from tests.services.tokenizer.completion_client import Services
from tests.stack import running_service
from tokenwire.channel import connect
from tokenwire.client import AnswerStream
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.pb.orca.v1.orca_pb2 import OrcaLoadReport, OrcaLoadReportRequest
from tokenwire.requests import text_start
from tokenwire.session import completion_session

HANG_SECONDS = 120
OFTEN = OrcaLoadReportRequest(report_interval=Duration(nanos=1))


def reports(channel: grpc.aio.Channel, request: OrcaLoadReportRequest) -> Any:
    """Begin a stream of reports, as Envoy does."""
    return channel.unary_stream(
        "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics",
        request_serializer=OrcaLoadReportRequest.SerializeToString,
        response_deserializer=OrcaLoadReport.FromString,
    )(request)


async def first(stream: Any, until: Callable[[OrcaLoadReport], bool]) -> OrcaLoadReport:
    async with asyncio.timeout(HANG_SECONDS):
        async for report in stream:
            if until(report):
                assert isinstance(report, OrcaLoadReport)
                return report
    raise AssertionError("the stream ended")


async def test_report_follows_the_load_of_the_engine(embedded_model: Path, tmp_path: Path) -> None:
    """Eight requests, of which two run, keep their places because their client grants no more."""
    few = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "64MiB")
    async with (
        running_service("engine", *few, "--max-running", "2", log=tmp_path / "engine") as engine,
        running_service(
            *("tokenizer", "--model", str(embedded_model), "--engine", engine.target),
            log=tmp_path / "tokenizer",
        ) as service,
        connect(service.target) as channel,
    ):
        stream = reports(channel, OFTEN)
        idle = await first(stream, lambda report: report.application_utilization < 0.5)
        assert idle.rps_fractional == 0
        session = completion_session(channel)
        start = text_start(
            "import", {"max_tokens": 100, "ignore_eos": True}, completion.DELIVERY_DELTAS
        )
        start.credit = 1
        async with AsyncExitStack() as running:
            for _ in range(8):
                await running.enter_async_context(AnswerStream(session, start))
            busy = await first(stream, lambda report: report.application_utilization > 2)
            assert busy.named_metrics["num_requests_running"] == 2
            assert busy.named_metrics["num_requests_waiting"] == 6
            assert 0 < busy.named_metrics["kv_cache_usage_perc"] <= 1
            assert busy.rps_fractional > 0
            assert busy.eps == 0
        await first(stream, lambda report: report.application_utilization < 0.5)
        await session.close()
        await service.stop()
        assert [report async for report in stream] == []  # the end is no error
        assert await stream.code() is grpc.StatusCode.OK


async def test_negative_interval_is_refused(services: Services) -> None:
    async with connect(services.target) as channel:
        stream = reports(channel, OrcaLoadReportRequest(report_interval=Duration(seconds=-1)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(aiter(stream))
    error = ServiceError.from_rpc_error(refused.value)
    assert (error.code, error.field) == (grpc.StatusCode.INVALID_ARGUMENT, "report_interval")


async def test_streams_are_bounded_and_their_places_are_given_back(
    services: Services,
) -> None:
    async with connect(services.target) as channel:
        streams = [reports(channel, OFTEN) for _ in range(256)]
        await asyncio.gather(*(first(stream, lambda _: True) for stream in streams))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await first(reports(channel, OFTEN), lambda _: True)
        error = ServiceError.from_rpc_error(refused.value)
        assert error.reason == "TOO_MANY_STREAMS"
        for stream in streams:
            stream.cancel()
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                try:
                    await first(reports(channel, OFTEN), lambda _: True)
                    return
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
