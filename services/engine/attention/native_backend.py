"""Attention on our own CPU kernels."""

from ctypes import byref

import torch
from torch import Tensor

from services.engine.attention.interface import AttentionBackend, KVCache
from services.engine.attention.torch_backend import TorchAttention
from services.engine.batch import StepBatch
from services.engine.kernels.amx import TILE, to_tiles
from services.engine.kernels.library import DTYPES, AttentionCall, Native
from services.engine.kernels.memory import allocate
from services.engine.model.spec import ModelSpec

__all__ = ["AmxAttention", "NativeAttention", "TiledAttention"]


class NativeAttention(TorchAttention):
    """float32 and bfloat16 on any CPU: decodes by the kernel, prompt chunks by torch.

    The cache's layout is TorchAttention's.
    """

    def __init__(self, native: Native, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__(spec, dtype, torch.device("cpu"))
        self._native = native

    def _write_and_decode(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: StepBatch,
        cache: KVCache,
        out: Tensor,
    ) -> None:
        call = _call(self._spec, layer, queries, keys, values, batch, cache, out)
        call.sequences = batch.num_decodes
        self._native.paged_decode(byref(call))


class AmxAttention(AttentionBackend):
    """bfloat16 on AMX: one kernel for decodes and prompt chunks. Its output is in tiles.

    Layout of a layer's keys and of its values: [blocks, kv_heads, block_size * head_dim], the last
    dimension in tiles (src/kernels.h, tw_amx_attend).
    """

    def __init__(self, native: Native, spec: ModelSpec) -> None:
        self._native = native
        self._spec = spec

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        if block_size % TILE:
            raise ValueError(f"the block size must be a multiple of {TILE}, not {block_size}")
        shape = (num_blocks, self._spec.num_kv_heads, block_size * self._spec.head_dim)

        def layers() -> tuple[Tensor, ...]:
            return tuple(allocate(shape, torch.bfloat16) for _ in range(self._spec.num_layers))

        return KVCache(layers(), layers(), block_size)

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: StepBatch,
        cache: KVCache,
        out: Tensor,
    ) -> None:
        call = _call(self._spec, layer, queries, keys, values, batch, cache, out)
        self._native.amx_attend(byref(call))


class TiledAttention(AttentionBackend):
    """Another backend's attention where AMX computes the products: its output in tiles."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        return self._backend.allocate(num_blocks, block_size)

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: StepBatch,
        cache: KVCache,
        out: Tensor,
    ) -> None:
        rows = torch.empty(out.shape, dtype=out.dtype)
        self._backend.attend(layer, queries, keys, values, batch, cache, rows)
        tiles = to_tiles(rows)
        out.as_strided(tiles.shape, tiles.stride()).copy_(tiles)  # `out` ends in the last tile


def _call(
    spec: ModelSpec,
    layer: int,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: StepBatch,
    cache: KVCache,
    out: Tensor,
) -> AttentionCall:
    return AttentionCall(
        queries.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        cache.keys[layer].data_ptr(),
        cache.values[layer].data_ptr(),
        batch.slots.data_ptr(),
        batch.query_starts.data_ptr(),
        batch.context_lengths.data_ptr(),
        batch.block_tables.data_ptr(),
        queries.stride(0),
        batch.block_tables.stride(0),
        queries.shape[0],
        batch.context_lengths.shape[0],
        spec.num_kv_heads,
        spec.num_heads // spec.num_kv_heads,
        spec.head_dim,
        cache.block_size,
        spec.windows[layer],
        spec.attention_scale,
        DTYPES[queries.dtype],
    )
