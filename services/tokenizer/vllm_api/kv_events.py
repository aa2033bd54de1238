"""Stream of the KV blocks that the engines hold, with their token ids."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TypeVar

import grpc
from smg_grpc_proto.generated import common_pb2

from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.engines.known_blocks import (
    BlockKey,
    BlockUpdate,
    KnownBlock,
    KnownBlocks,
)
from services.tokenizer.vllm_api.pool_load import PoolLoad, load_of
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["kv_event_batches"]

T = TypeVar("T")
_LOAD_SECONDS = 0.1
_HEARTBEAT_SECONDS = 1.0
_BLOCKS = 512
"""Most blocks of a batch"""


async def kv_event_batches(
    pool: EnginePool, blocks: KnownBlocks, first: int
) -> AsyncGenerator[common_pb2.KvEventBatch, None]:
    """Yield all known blocks that engines hold, as a snapshot, and then their changes.

    Each event names its group of layers. An event of stored blocks names the kind of the group.

    A subscriber that reads too slowly gets another snapshot instead of the changes. The load comes
    with each batch, and in batches of its own when it changes, or once a second.

    first: sequence number to begin with. Each stream has its own numbers from 1, and no batch is
    sent twice. Raises OUT_OF_RANGE unless `first` is 0, and RESOURCE_EXHAUSTED for too many
    subscribers.
    """
    if first:
        raise ServiceError(
            grpc.StatusCode.OUT_OF_RANGE,
            "SEQUENCE_UNKNOWN",
            f"The batch {first} is not kept; subscribe with start_sequence_number 0.",
            field="start_sequence_number",
        )
    wake = asyncio.Event()
    stream = _Batches(pool, blocks.groups)
    with blocks.watch(wake) as watch:
        while True:
            wake.clear()
            if (update := watch.take()) is not None:
                for batch in stream.of_update(update):
                    yield batch
            elif stream.is_load_due:
                yield stream.of_load()
            try:
                async with asyncio.timeout(_LOAD_SECONDS):
                    await wake.wait()
            except TimeoutError:
                continue


class _Batches:
    """Writer of the batches of one stream."""

    def __init__(self, pool: EnginePool, groups: Mapping[int, engine_pb2.CacheGroup]) -> None:
        self._pool = pool
        self._groups = groups
        self._number = 0
        self._events = 0
        self._sample = 0
        self._load: PoolLoad | None = None
        self._load_sent_at = 0.0

    @property
    def is_load_due(self) -> bool:
        """True if the load has changed, or was not sent for a second."""
        is_old = time.monotonic() - self._load_sent_at >= _HEARTBEAT_SECONDS
        return is_old or load_of(self._pool) != self._load

    def of_load(self) -> common_pb2.KvEventBatch:
        """Return a batch without events, which repeats the last number."""
        return self._batch((), is_alone=True)

    def of_update(self, update: BlockUpdate) -> Iterator[common_pb2.KvEventBatch]:
        """Yield the batches of an update."""
        if update.is_whole:
            yield from self._snapshot(update.stored)
            return
        for keys in _parts(update.removed):
            by_group = groupby(sorted(keys, key=attrgetter("group")), attrgetter("group"))
            removed = [
                common_pb2.KvBlocksRemoved(
                    block_hashes=[_number(key.hash) for key in some], group_idx=group
                )
                for group, some in by_group
            ]
            yield self._numbered([self._event(removed=each) for each in removed])
        for some in _parts(update.stored):
            yield self._numbered([self._event(stored=run) for run in self._runs(some)])

    def _snapshot(
        self, stored: Sequence[tuple[BlockKey, KnownBlock]]
    ) -> Iterator[common_pb2.KvEventBatch]:
        # an engine may hold other services' prompts, and those of tenants
        is_partial = any(link.cached.num_reported > len(stored) for link in self._pool.serving)
        chunks = [*_parts(stored)] or [()]
        for index, some in enumerate(chunks):
            events = [common_pb2.KvCacheEvent(stored=run) for run in self._runs(some)]
            if index == 0:
                cleared = common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared())
                events.insert(0, cleared)
            batch = self._numbered(events)
            batch.snapshot.index = index
            batch.snapshot.count = len(chunks)
            batch.snapshot.blocks = len(stored)
            batch.snapshot.unknown_before = int(is_partial)
            yield batch

    def _runs(
        self, stored: Sequence[tuple[BlockKey, KnownBlock]]
    ) -> Iterator[common_pb2.KvBlocksStored]:
        """Yield the blocks of each group in runs; in a run, each block follows the one before."""
        by_group = sorted(stored, key=lambda item: item[0].group)  # stable: parents stay first
        for number, items in groupby(by_group, lambda item: item[0].group):
            run, last = self._run(number), b""
            for key, block in items:
                if run.blocks and block.parent != last:
                    yield run
                    run = self._run(number)
                if not run.blocks and not block.is_first:
                    run.parent_block_hash = _number(block.parent)
                size = len(block.ids)
                run.blocks.add(block_hash=_number(key.hash), token_ids=block.ids, block_size=size)
                last = key.hash
            yield run

    def _run(self, number: int) -> common_pb2.KvBlocksStored:
        """Return an empty run of a group, with vLLM's name for the group's kind of cache."""
        group = self._groups[number]
        run = common_pb2.KvBlocksStored(group_idx=number, kv_cache_spec_kind="full_attention")
        if group.snapshot_interval:
            run.kv_cache_spec_kind = "mamba"
        elif group.window:
            run.kv_cache_spec_kind = "sliding_window"
            run.kv_cache_spec_sliding_window = group.window
        return run

    def _event(
        self,
        stored: common_pb2.KvBlocksStored | None = None,
        removed: common_pb2.KvBlocksRemoved | None = None,
    ) -> common_pb2.KvCacheEvent:
        self._events += 1
        return common_pb2.KvCacheEvent(event_id=self._events, stored=stored, removed=removed)

    def _numbered(self, events: Sequence[common_pb2.KvCacheEvent]) -> common_pb2.KvEventBatch:
        self._number += 1
        return self._batch(events)

    def _batch(
        self, events: Sequence[common_pb2.KvCacheEvent], *, is_alone: bool = False
    ) -> common_pb2.KvEventBatch:
        self._load = load_of(self._pool)
        self._load_sent_at = time.monotonic()
        self._sample += 1
        return common_pb2.KvEventBatch(
            sequence_number=self._number,
            timestamp=time.time(),
            events=events,
            dp_rank=0,
            load=self._load.to_engine_load(self._sample, is_alone=is_alone),
        )


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    return (items[begin : begin + _BLOCKS] for begin in range(0, len(items), _BLOCKS))


def _number(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "little", signed=True)
