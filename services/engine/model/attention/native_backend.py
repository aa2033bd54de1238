"""Attention on the CPU kernels."""

from collections.abc import Mapping

import torch
from torch import Tensor

from services.engine.kernels.library import DTYPES, Kernel, Native
from services.engine.kernels.memory import allocate
from services.engine.kernels.structures import AttentionCall
from services.engine.kernels.tiles import TILE
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import AttentionBackend, AttentionStep, KVCache

__all__ = ["NativeAttention", "TiledAttention"]

_RUN = 16
"""Tokens of a block that lie side by side; blocks and heads are padded to multiples of it"""
_SCALE_BYTES = 4
"""Bytes of the scale of one token of one head in int8"""


class NativeAttention(AttentionBackend):
    """Attention in float32 and bfloat16 on any CPU, over a cache of any type.

    A layer's keys and values are [blocks, kv_heads, numbers] each, in runs of 16 tokens
    (src/kernels.h, tw_paged_attend). In int8, each token of each head has a scale.
    """

    def __init__(
        self,
        native: Native,
        spec: ModelSpec,
        kv_dtype: torch.dtype,
        *,
        tiled: bool = False,
    ) -> None:
        """tiled: whether outputs are in tiles."""
        super().__init__(kv_dtype)
        self._native = native
        self._spec = spec
        self._tiled = tiled

    def token_bytes(self, layer: AttentionSpec) -> int:
        numbers = self._head_numbers(layer.head_dim) + self._head_numbers(layer.value_dim)
        return layer.num_kv_heads * numbers * self.kv_dtype.itemsize

    def allocate(
        self,
        num_blocks: int | Mapping[int, int],
        block_size: int,
        layers: Mapping[int, AttentionSpec] | None = None,
    ) -> KVCache:
        places = -(-block_size // _RUN) * _RUN

        def make(layer: AttentionSpec, blocks: int, width: int) -> Tensor:
            shape = (blocks, layer.num_kv_heads, places * self._head_numbers(width))
            return allocate(shape, self.kv_dtype)

        return KVCache.allocate(layers or self._spec.paged_layers, num_blocks, block_size, make)

    def attend(self, layer: int, step: AttentionStep) -> None:
        call = _call(self._spec.attention(layer), layer, step)
        call.cache_dtype, call.is_tiled = DTYPES[self.kv_dtype], self._tiled
        self._native.run(Kernel.PAGED_ATTENTION, call)

    def _head_numbers(self, width: int) -> int:
        """Return how many numbers a head keeps of a token for a key or a value of this width."""
        scales = _SCALE_BYTES if self.kv_dtype == torch.int8 else 0
        return -(-width // _RUN) * _RUN + scales


class TiledAttention(AttentionBackend):
    """Attention in bfloat16 in tiles, by one kernel for decodes and prompt chunks.

    Its output is in tiles too.
    A layer's keys are [blocks, kv_heads, block_size * head_dim], and its values likewise, the last
    dimension in tiles (src/kernels.h, tw_tiled_attend).
    """

    def __init__(self, native: Native, spec: ModelSpec) -> None:
        super().__init__(torch.bfloat16)
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

        def make(layer: AttentionSpec, blocks: int, width: int) -> Tensor:
            shape = (blocks, layer.num_kv_heads, block_size * width)
            return allocate(shape, self.kv_dtype)

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
        None if step.slopes is None else step.slopes.data_ptr(),
        None if batch.visible_ends is None else batch.visible_ends.data_ptr(),
        queries.stride(0),
        batch.block_tables.stride(0),
        step.keys.shape[0],
        batch.context_lengths.shape[0],
        spec.num_kv_heads,
        spec.num_heads // spec.num_kv_heads,
        spec.head_dim,
        spec.value_dim,
        cache.block_size,
        spec.window,
        step.cache_group,
        spec.scale,
        spec.cap,
        DTYPES[queries.dtype],
    )
