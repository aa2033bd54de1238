"""Attention within whole texts, without a cache, in torch."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import AttentionBackend, AttentionStep, KVCache

__all__ = ["TextAttention"]


class TextAttention(AttentionBackend):
    """Every token of a text sees all of it, or those within a window before and after it.

    A step holds whole texts, so nothing is read from the cache, whose tensors are empty.
    """

    name = "torch"

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        bias: Tensor | None = None,
    ) -> None:
        """bias: as EncoderWeights.attention_bias; layers then have no windows."""
        self._spec = spec
        self._dtype = dtype
        self._device = device
        self._bias = None if bias is None else bias.to(dtype)
        self._addend = torch.empty((spec.attention(0).num_heads, 0, 0), dtype=dtype, device=device)
        """Bias of the longest text so far: [heads, tokens, tokens]"""

    def allocate(
        self,
        num_blocks: int | Mapping[int, int],
        block_size: int,
        layers: Mapping[int, AttentionSpec] | None = None,
    ) -> KVCache:
        def make(_: AttentionSpec, blocks: int) -> Tensor:
            return torch.empty((blocks, 0), dtype=self._dtype, device=self._device)

        return KVCache.allocate(layers or self._spec.paged_layers, num_blocks, block_size, make)

    def attend(self, layer: int, step: AttentionStep) -> None:
        spec = self._spec.attention(layer)
        out = step.out.view(step.queries.shape)
        start = 0
        for length in step.batch.query_lengths_host:
            own = slice(start, start + length)
            queries, keys, values = (
                heads[own].transpose(0, 1)[None] for heads in (step.queries, step.keys, step.values)
            )
            mask = self._mask(length, spec.window)
            attended = scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                scale=spec.scale,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )
            out[own] = attended[0].transpose(0, 1)
            start += length

    def _mask(self, length: int, window: int) -> Tensor | None:
        """Return which keys the tokens of a text see, or the addend to their scores; None = all."""
        if self._bias is not None:
            return self._addends(self._bias, length)
        return self._near(length, window) if 0 < window < length else None

    def _addends(self, bias: Tensor, length: int) -> Tensor:
        """Return the addend for each pair of tokens: [heads, length, length]."""
        if self._addend.shape[1] < length:
            index = torch.arange(length, device=self._device)
            self._addend = bias[:, index - index[:, None] + bias.shape[1] // 2]
        return self._addend[:, :length, :length]

    def _near(self, length: int, window: int) -> Tensor:
        """Return which tokens are less than `window` apart: bool [length, length]."""
        index = torch.arange(length, device=self._device)
        return (index[:, None] - index).abs() < window
