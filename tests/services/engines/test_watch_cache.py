"""WatchCache: a client that computes the hashes of a prompt knows what the engine holds of it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from services.common.block_hash import prefix_hashes, tenant_salt
from tests.stack import RunningService
from tokenwire.client import EngineClient
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub

Updates = AsyncIterator[engine_pb2.WatchCacheResponse]


def split(hashes: bytes) -> set[bytes]:
    return {hashes[i : i + 16] for i in range(0, len(hashes), 16)}


async def until_held(updates: Updates, held: set[bytes], wanted: set[bytes]) -> set[bytes]:
    """Follow the cache, which holds `held`, until it holds all that is wanted."""
    async with asyncio.timeout(60):
        while not wanted <= held:
            update = await anext(updates)
            [change] = update.groups
            held = (set() if update.is_whole else held - split(change.removed)) | split(
                change.stored
            )
    return held


async def test_watchers_see_what_a_prompt_leaves_and_what_a_flush_takes(
    engine: RunningService, channel: grpc.aio.Channel
) -> None:
    control: Any = EngineControlServiceStub(channel)
    size = (await control.GetModel(engine_pb2.GetModelRequest())).block_size
    prompt = [number % 40 + 1 for number in range(size * 2 + 3)]
    hashes = set(prefix_hashes(prompt, tenant_salt(""), size))
    assert len(hashes) == 2
    early = aiter(control.WatchCache(engine_pb2.WatchCacheRequest(interval_seconds=0.01)))
    assert (await anext(early)).is_whole
    async with EngineClient(engine.target) as client:
        await client.generate(prompt, max_tokens=2, ignore_eos=True)
    held = await until_held(early, set(), hashes)
    late = aiter(control.WatchCache(engine_pb2.WatchCacheRequest()))
    await until_held(late, set(), hashes)
    freed = (await control.FlushCache(engine_pb2.FlushCacheRequest())).freed_blocks
    assert freed >= len(hashes)
    update = await anext(early)
    [change] = update.groups
    assert not held & split(change.stored)
    assert hashes <= (held if update.is_whole else split(change.removed))


@pytest.mark.parametrize("interval", [0.0, 61.0, float("nan")])
async def test_interval_out_of_range_is_refused(channel: grpc.aio.Channel, interval: float) -> None:
    control: Any = EngineControlServiceStub(channel)
    request = engine_pb2.WatchCacheRequest(interval_seconds=interval)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await anext(aiter(control.WatchCache(request)))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_watchers_are_limited(channel: grpc.aio.Channel) -> None:
    """Each costs the engine memory."""
    control: Any = EngineControlServiceStub(channel)
    watches = [control.WatchCache(engine_pb2.WatchCacheRequest()) for _ in range(64)]
    for watch in watches:
        await watch.read()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await control.WatchCache(engine_pb2.WatchCacheRequest()).read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    for watch in watches:
        watch.cancel()
