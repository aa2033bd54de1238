"""Tests of benchmarks.load: requests of a scenario, counts and latencies."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.load import Measurement, measure, warm_up
from benchmarks.prompts import Prompts
from benchmarks.scenarios import Scenario
from tokenwire.load.exchanges import Latency
from tokenwire.load.load_run import Target
from tokenwire.load.workloads import ClosedLoop, OpenLoop, Workload

from .scripted_server import Answer, event, scripted_server, stream

PROMPTS = Prompts(vocabulary=1000, seed="test")


def scenario(*workloads: Workload) -> Scenario:
    return Scenario("test", "a test", workloads)


ONE = scenario(Workload("streams", ClosedLoop(1), prompt=3, output=4, requests=1))


async def measure_one(pieces: Sequence[bytes], status: int = 200) -> Measurement:
    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        return pieces

    async with scripted_server(answer, status) as (url, _):
        return await measure(Target(url, "model"), ONE, PROMPTS)


def errors(measurement: Measurement) -> list[str]:
    return list(measurement.workloads["streams"].errors)


async def test_output_tokens_are_the_usage_and_not_the_number_of_events() -> None:
    report = (await measure_one([stream(events=2, tokens=4)])).workloads["streams"]
    assert report.output_tokens == 4
    assert report.prompt_tokens == 3
    assert not report.errors


async def test_event_with_only_a_finish_reason_is_not_a_token() -> None:
    report = (await measure_one([stream(events=4, tokens=4)])).workloads["streams"]
    assert report.tokens_per_event == 1.0


@pytest.mark.parametrize("size", [1, 7, 64])
async def test_events_may_be_split_over_pieces(size: int) -> None:
    whole = stream(events=4, tokens=4)
    pieces = [whole[start : start + size] for start in range(0, len(whole), size)]
    report = (await measure_one(pieces)).workloads["streams"]
    assert (report.output_tokens, report.tokens_per_event) == (4, 1.0)


async def test_wrong_number_of_output_tokens_is_an_error() -> None:
    """Otherwise a server that stops early would seem fast."""
    assert errors(await measure_one([stream(events=3, tokens=3)])) == ["3 tokens instead of 4"]


async def test_error_event_in_a_stream_is_an_error() -> None:
    (error,) = errors(await measure_one([stream(events=4, tokens=4), event({"error": "lost"})]))
    assert "lost" in error


async def test_refused_request_is_an_error_with_its_reason() -> None:
    (error,) = errors(await measure_one([b"too many requests"], status=429))
    assert error == "HTTP 429: too many requests"


async def test_unreachable_server_is_an_error() -> None:
    async with scripted_server(_at_once(4)) as (url, _):
        pass
    measurement = await measure(Target(url, "model"), ONE, PROMPTS)
    assert measurement.errors == 1


async def test_idle_connection_closed_by_the_server_is_not_an_error() -> None:
    several = scenario(Workload("streams", ClosedLoop(2), prompt=3, output=4, requests=8))
    async with scripted_server(_at_once(4), keeps_alive=False) as (url, seen):
        measurement = await measure(Target(url, "model"), several, PROMPTS)
    assert measurement.errors == 0
    assert len(seen.bodies) == 8


async def test_closed_loop_keeps_its_concurrency_and_sends_every_request_once() -> None:
    full = asyncio.Event()
    arrived = 0

    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        nonlocal arrived
        arrived += 1
        if arrived == 5:
            full.set()
        await full.wait()  # Answer nothing until five requests run at once.
        return [stream(events=4, tokens=4)]

    load = scenario(Workload("streams", ClosedLoop(5), prompt=3, output=4, requests=23))
    async with asyncio.timeout(30), scripted_server(answer) as (url, seen):
        measurement = await measure(Target(url, "model"), load, PROMPTS)
    assert len(seen.bodies) == 23
    assert seen.most_running == 5
    assert measurement.workloads["streams"].requests == 23
    assert measurement.workloads["streams"].output_tokens == 23 * 4


async def test_open_loop_does_not_wait_for_answers() -> None:
    """Otherwise a slow server would receive fewer requests and seem better than it is."""
    all_here = asyncio.Event()
    arrived = 0

    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        nonlocal arrived
        arrived += 1
        if arrived == 8:
            all_here.set()
        await all_here.wait()
        return [stream(events=4, tokens=4)]

    load = scenario(Workload("streams", OpenLoop(1000.0), prompt=3, output=4, requests=8))
    async with asyncio.timeout(30), scripted_server(answer) as (url, seen):
        measurement = await measure(Target(url, "model"), load, PROMPTS)
    assert seen.most_running == 8
    assert measurement.workloads["streams"].requests == 8


async def test_workload_without_a_number_of_requests_ends_with_the_others() -> None:
    long_asked = asyncio.Event()

    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        if body["max_tokens"] == 1:
            long_asked.set()
            return [stream(events=1, tokens=1)]
        await long_asked.wait()
        return [stream(events=4, tokens=4)]

    load = scenario(
        Workload("streams", ClosedLoop(2), prompt=3, output=4, requests=4),
        Workload("long", OpenLoop(1000.0), prompt=9, output=1, requests=None),
    )
    async with asyncio.timeout(30), scripted_server(answer) as (url, seen):
        measurement = await measure(Target(url, "model"), load, PROMPTS)
    long = [body for body in seen.bodies if body["max_tokens"] == 1]
    assert measurement.workloads["long"].requests == len(long) > 0
    assert measurement.errors == 0


async def test_only_a_constrained_workload_sends_a_schema() -> None:
    load = scenario(
        Workload("free", ClosedLoop(1), prompt=3, output=4, requests=1),
        Workload("json", ClosedLoop(1), 3, 4, 1, json_schema='{"type": "array"}'),
    )
    async with scripted_server(_at_once(4)) as (url, seen):
        await measure(Target(url, "model"), load, PROMPTS)
    free, constrained = sorted(seen.bodies, key=lambda body: "response_format" in body)
    assert constrained["response_format"]["json_schema"]["schema"] == {"type": "array"}
    assert "response_format" not in free
    # The server refuses ignore_eos with a grammar that ends.
    assert "ignore_eos" in free
    assert "ignore_eos" not in constrained


async def test_warm_up_sends_one_short_request_per_concurrent_stream() -> None:
    load = scenario(Workload("streams", ClosedLoop(6), prompt=3, output=64, requests=100))
    async with scripted_server(_at_once(4)) as (url, seen):
        await warm_up(Target(url, "model"), load, PROMPTS)
    assert [body["max_tokens"] for body in seen.bodies] == [4] * 6


def test_percentiles_are_nearest_ranks() -> None:
    latency = Latency.of([second / 1000 for second in range(100, 0, -1)])
    assert latency == Latency(p50=50.0, p90=90.0, p99=99.0, max=100.0)


def test_empty_list_of_times_has_no_percentiles() -> None:
    assert Latency.of([]) is None


@given(st.lists(st.integers(1, 10_000), min_size=1))
def test_percentiles_are_measured_times_in_ascending_order(milliseconds: list[int]) -> None:
    latency = Latency.of([time / 1000 for time in milliseconds])
    assert latency is not None
    ranks = [latency.p50, latency.p90, latency.p99, latency.max]
    assert ranks == sorted(ranks)
    assert latency.max == max(milliseconds)
    assert {round(rank) for rank in ranks} <= set(milliseconds)
    assert sum(time <= latency.p50 for time in milliseconds) * 2 >= len(milliseconds)


def _at_once(tokens: int) -> Answer:
    async def answer(body: dict[str, Any]) -> Sequence[bytes]:
        return [stream(events=tokens, tokens=tokens)]

    return answer
