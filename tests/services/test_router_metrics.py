"""The load of a replica, as the routers that know vLLM read it at the shim and the tokenizer."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.services.shim import running_shim
from tests.stack import RunningService, metrics_of, running_service
from tokenwire.channel import connect
from tokenwire.client import AnswerStream, Client
from tokenwire.pb.completion.v1 import completion_pb2 as completion
from tokenwire.requests import text_start
from tokenwire.session import completion_session

HANG_SECONDS = 120
PLACES = 2
"""Sequences that run at once on each engine"""


@dataclass(frozen=True, slots=True)
class Replica:
    """A shim, one tokenizer service and two engines."""

    shim: str
    """URL of its metrics"""
    tokenizer: RunningService
    engines: list[RunningService]

    @property
    def urls(self) -> list[str]:
        host, port = self.tokenizer.target.split(":")
        return [self.shim, f"http://{host}:{int(port) + 1000}/metrics"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def replica(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Replica]:
    logs = tmp_path_factory.mktemp("logs")
    model = ("--model", str(embedded_model), "--model-id", "m")
    few = (*model, "--kv-memory", "64MiB", "--max-running", str(PLACES))
    async with (
        running_service("engine", *few, log=logs / "one") as one,
        running_service("engine", *few, log=logs / "two") as two,
        running_service(
            *("tokenizer", *model, "--engine", f"{one.target},{two.target}", "--vllm-metrics"),
            log=logs / "tokenizer",
        ) as tokenizer,
        running_shim("--tokenizer", tokenizer.target, "--vllm-metrics") as shim,
    ):
        yield Replica(f"{shim.url}/metrics", tokenizer, [one, two])


async def scraped(url: str) -> dict[str, Metric]:
    async with httpx.AsyncClient(timeout=HANG_SECONDS) as client:
        text = (await client.get(url)).text
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], name: str) -> float:
    """Return the value that a router reads: there must be one series, or it reads any of them."""
    samples = families[f"vllm:{name}"].samples
    [sample] = [each for each in samples if not each.name.endswith("_created")]
    assert sample.labels["model_name"] == "m"
    return sample.value


async def until(url: str, is_so: Callable[[dict[str, Metric]], bool]) -> dict[str, Metric]:
    async with asyncio.timeout(HANG_SECONDS):
        while not is_so(families := await scraped(url)):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.05)
    return families


async def test_engines_of_a_model_are_one_series(replica: Replica) -> None:
    """llm-d's endpoint picker reads the first series, vLLM's production stack the last."""
    held = [await metrics_of(engine.target) for engine in replica.engines]
    blocks = sum(each["tokenwire_engine_kv_blocks"] for each in held)
    for url in replica.urls:

        def has_both(families: dict[str, Metric]) -> bool:
            samples = families["vllm:cache_config_info"].samples
            return [each.labels["num_gpu_blocks"] for each in samples] == [str(int(blocks))]

        [cache] = (await until(url, has_both))["vllm:cache_config_info"].samples
        assert float(cache.labels["block_size"]) == held[0]["tokenwire_engine_kv_block_size"]


async def test_router_sees_what_runs_and_waits(replica: Replica) -> None:
    """Their client grants no more tokens, so that they keep their places."""
    start = text_start(
        "import", {"max_tokens": 100, "ignore_eos": True}, completion.DELIVERY_DELTAS
    )
    start.credit = 1
    async with connect(replica.tokenizer.target) as channel, AsyncExitStack() as streams:
        session = completion_session(channel)
        streams.push_async_callback(session.close)
        for _ in range(3 * PLACES):
            await streams.enter_async_context(AnswerStream(session, start))
        for url in replica.urls:
            families = await until(
                url,
                lambda each: (
                    value(each, "num_requests_running") == 2 * PLACES
                    and value(each, "num_requests_waiting") == PLACES
                    and value(each, "prompt_tokens") > 0
                ),
            )
            for name in ("kv_cache_usage_perc", "gpu_cache_usage_perc"):
                assert 0 < value(families, name) <= 1
    for url in replica.urls:
        families = await until(url, lambda each: value(each, "num_requests_running") == 0)
        assert value(families, "num_requests_waiting") == 0


async def test_router_sees_tokens_and_prefix_hits(replica: Replica) -> None:
    text = "x = compute(x)\n" * 40
    before = [await scraped(url) for url in replica.urls]
    async with Client(replica.tokenizer.target) as client:
        await client.generate(text, max_tokens=1, ignore_eos=True)
        answer = await client.generate(text, max_tokens=1, ignore_eos=True)
    assert answer.usage.cached_tokens > 0
    expected = {
        "prompt_tokens": 2 * answer.usage.prompt_tokens,
        "generation_tokens": 2,
        "prefix_cache_queries": 2 * answer.usage.prompt_tokens,
        "prefix_cache_hits": answer.usage.cached_tokens,
        "gpu_prefix_cache_hits": answer.usage.cached_tokens,
    }
    for url, earlier in zip(replica.urls, before, strict=True):
        for name, count in expected.items():
            target = value(earlier, name) + count
            await until(url, lambda each, n=name, t=target: value(each, n) == t)  # type: ignore[misc]


async def test_model_without_an_engine_has_no_series(embedded_model: Path, tmp_path: Path) -> None:
    """Stale values would draw requests to a replica that can't serve them."""
    model = ("--model", str(embedded_model), "--model-id", "m")
    async with (
        running_service(
            *("engine", *model, "--kv-memory", "64MiB"), log=tmp_path / "engine"
        ) as engine,
        running_service(
            *("tokenizer", *model, "--engine", engine.target, "--vllm-metrics"),
            log=tmp_path / "tokenizer",
        ) as tokenizer,
        running_shim("--tokenizer", tokenizer.target, "--vllm-metrics") as shim,
    ):
        replica = Replica(f"{shim.url}/metrics", tokenizer, [engine])
        for url in replica.urls:
            await until(url, lambda each: bool(each["vllm:num_requests_running"].samples))
        await engine.stop()
        for url in replica.urls:
            await until(url, lambda each: not each["vllm:num_requests_running"].samples)
