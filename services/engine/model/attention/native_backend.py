"""Attention on the CPU kernels."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.engine.kernels.library import DTYPES, AttentionCall, Kernel, Native
from services.engine.kernels.memory import allocate
from services.engine.kernels.tiles import TILE
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import AttentionBackend, AttentionStep, KVCache
from services.engine.model.attention.torch_backend import TorchAttention

__all__ = ["NativeAttention", "TiledAttention"]


class NativeAttention(TorchAttention):
    """float32 and bfloat16 on any CPU: decodes on the kernel, prompt chunks in torch.

    The cache layout is TorchAttention's.
    """

    name = "native"

    def __init__(
        self,
        native: Native,
        spec: ModelSpec,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(spec, dtype, torch.device("cpu"))
        self._native = native

    def attend(self, layer: int, step: AttentionStep) -> None:
        self._write_and_decode(layer, step)
        if not step.batch.is_decode:
            self._prefill(layer, step)

    def _write_and_decode(self, layer: int, step: AttentionStep) -> None:
        call = _call(self._spec.attention(layer), layer, step)
        call.sequences = step.batch.num_decodes
        self._native.run(Kernel.DECODE, call)


class TiledAttention(AttentionBackend):
    """bfloat16 in tiles: one kernel for decodes and prompt chunks. Its output is in tiles too.

    A layer's keys and values are [blocks, kv_heads, block_size * head_dim] each, the last dimension
    in tiles (src/kernels.h, tw_tiled_attend).
    """

    def __init__(self, native: Native, spec: ModelSpec) -> None:
        self._native = native
        self._spec = spec

    def allocate(
        self,
        num_blocks: int | Mapping[int, int],
        block_size: int,
        layers: Mapping[int, AttentionSpec] | None = None,
    ) -> KVCache:
        if block_size % TILE:
            raise ValueError(f"the block size must be a multiple of {TILE}, got {block_size}")

        def make(layer: AttentionSpec, blocks: int) -> Tensor:
            shape = (blocks, layer.num_kv_heads, block_size * layer.head_dim)
            return allocate(shape, torch.bfloat16)

        return KVCache.allocate(layers or self._spec.paged_layers, num_blocks, block_size, make)

    def attend(self, layer: int, step: AttentionStep) -> None:
        call = _call(self._spec.attention(layer), layer, step)
        self._native.run(Kernel.ATTENTION, call)


def _call(spec: AttentionSpec, layer: int, step: AttentionStep) -> AttentionCall:
    queries, batch, cache = step.queries, step.batch, step.cache
    return AttentionCall(
        queries.data_ptr(),
        step.keys.data_ptr(),
        step.values.data_ptr(),
        step.out.data_ptr(),
        cache.keys[layer].data_ptr(),
        cache.values[layer].data_ptr(),
        batch.slots.data_ptr(),
        batch.query_starts.data_ptr(),
        batch.context_lengths.data_ptr(),
        batch.block_tables.data_ptr(),
        None if step.sinks is None else step.sinks.data_ptr(),
        None if batch.visible_ends is None else batch.visible_ends.data_ptr(),
        queries.stride(0),
        batch.block_tables.stride(0),
        step.keys.shape[0],
        batch.context_lengths.shape[0],
        spec.num_kv_heads,
        spec.num_heads // spec.num_kv_heads,
        spec.head_dim,
        cache.block_size,
        spec.window,
        step.cache_group,
        spec.scale,
        spec.cap,
        DTYPES[queries.dtype],
    )
