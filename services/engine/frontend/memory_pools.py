"""Memory of the engine by part: weights, caches of groups of layers, adapters."""

from collections.abc import Iterator, Sequence

from services.engine.messages import PoolUse
from services.engine.model_description import ModelDescription
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["memory_pools"]


def memory_pools(
    model: ModelDescription, uses: Sequence[PoolUse], adapter_bytes: int
) -> Iterator[types_pb2.MemoryPool]:
    """Yield the parts. uses: of the cache groups; empty before the first step."""
    weights = model.weight_bytes
    yield types_pb2.MemoryPool(kind="weights", bytes=weights, used_bytes=weights)
    known = uses or [PoolUse(0, 0)] * len(model.cache_groups)
    for group, size, use in zip(model.cache_groups, model.pool_bytes, known, strict=True):
        yield types_pb2.MemoryPool(
            kind="states" if group.snapshot_interval else "kv_cache",
            window=group.window,
            bytes=group.blocks * size,
            used_bytes=use.held * size,
            cached_bytes=use.cached * size,
        )
    if adapter_bytes:
        yield types_pb2.MemoryPool(kind="adapters", bytes=adapter_bytes, used_bytes=adapter_bytes)
