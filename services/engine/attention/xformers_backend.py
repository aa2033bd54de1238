"""Attention on CUDA through xformers. The only file that imports it.

Not yet run on a GPU: the shapes follow xformers 0.0.35's documentation of its paged biases.
"""

import torch
from torch import Tensor
from xformers.ops import fmha
from xformers.ops.fmha.attn_bias import (
    BlockDiagonalPaddedKeysMask,
    PagedBlockDiagonalPaddedKeysMask,
)

from services.engine.attention.interface import KVCache
from services.engine.attention.torch_backend import TorchAttention
from services.engine.batch import StepBatch

__all__ = ["XformersAttention"]

_PAGE = 64
"""The Triton split-K kernel wants pages of a multiple of this many tokens"""


class XformersAttention(TorchAttention):
    """Decodes by the Triton split-K kernel, from the pages themselves; prompt chunks by torch.

    The layout differs from TorchAttention's in its strides only: a block's tokens are outermost, so
    that the cache is one run of pages × page size tokens, which is how xformers reads it.
    """

    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        if block_size % _PAGE:
            raise ValueError(f"the block size must be a multiple of {_PAGE}, not {block_size}")
        shape = (num_blocks, block_size, self._spec.num_kv_heads, self._spec.head_dim)

        def layers() -> tuple[Tensor, ...]:
            return tuple(
                torch.zeros(shape, dtype=self._dtype, device=self._device).transpose(1, 2)
                for _ in range(self._spec.num_layers)
            )

        return KVCache(layers(), layers(), block_size)

    def _decode(
        self, layer: int, queries: Tensor, batch: StepBatch, cache: KVCache, out: Tensor
    ) -> None:
        spec, count = self._spec, batch.num_decodes
        if spec.windows[layer] or not spec.has_plain_attention:
            super()._decode(layer, queries, batch, cache, out)
            return
        group = spec.num_heads // spec.num_kv_heads
        tables = batch.block_tables[:count]
        bias = BlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[1] * count,
            kv_padding=tables.shape[1] * cache.block_size,
            kv_seqlen=list(batch.context_lengths_host[:count]),
        ).make_paged(tables, cache.block_size, PagedBlockDiagonalPaddedKeysMask)

        def pages(layer_cache: Tensor) -> Tensor:
            """[1, tokens, kv_heads, group, head_dim]; the group is a stride of 0, not a copy."""
            tokens = layer_cache.transpose(1, 2).reshape(1, -1, spec.num_kv_heads, 1, spec.head_dim)
            return tokens.expand(-1, -1, -1, group, -1)

        attended = fmha.memory_efficient_attention_forward(
            queries[:count].reshape(1, count, spec.num_kv_heads, group, spec.head_dim),
            pages(cache.keys[layer]),
            pages(cache.values[layer]),
            attn_bias=bias,
            scale=spec.attention_scale,
            op=fmha.triton_splitk.FwOp,
        )
        out[:count] = attended.reshape(count, spec.num_heads, spec.head_dim)
