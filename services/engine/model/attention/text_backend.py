"""Attention within whole texts, without a cache, in torch."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import AttentionBackend, AttentionStep, KVCache
from services.engine.model.attention.pair_scores import PairScores

__all__ = ["TextAttention"]


class TextAttention(AttentionBackend):
    """Backend whose tokens see all of their text, or a window before and after them.

    A step holds whole texts, so nothing is read from the cache, whose tensors are empty.
    """

    name = "torch"

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        pair_scores: PairScores | None = None,
    ) -> None:
        """pair_scores: layers that have them have no windows."""
        super().__init__(dtype)
        self._spec = spec
        self._device = device
        self._pair_scores = pair_scores

    def allocate(
        self,
        num_blocks: int | Mapping[int, int],
        block_size: int,
        layers: Mapping[int, AttentionSpec] | None = None,
    ) -> KVCache:
        def make(_: AttentionSpec, blocks: int, width: int) -> Tensor:
            return torch.empty((blocks, 0), dtype=self.kv_dtype, device=self._device)

        return KVCache.allocate(layers or self._spec.paged_layers, num_blocks, block_size, make)

    def attend(self, layer: int, step: AttentionStep) -> None:
        spec = self._spec.attention(layer)
        out = step.out.view(step.queries.shape)
        start = 0
        lengths = step.batch.query_lengths_host
        for length, seen in zip(lengths, step.batch.attended_host or lengths, strict=True):
            own, attended_to = slice(start, start + length), slice(start, start + seen)
            queries = step.queries[own].transpose(0, 1)[None]
            keys, values = (
                heads[attended_to].transpose(0, 1)[None] for heads in (step.keys, step.values)
            )
            mask = None
            if self._pair_scores is not None:
                mask = self._pair_scores.addends(layer, queries[0], keys[0], spec.scale)
            elif 0 < spec.window < length:
                mask = self._near(length, spec.window)[:, :seen]
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

    def _near(self, length: int, window: int) -> Tensor:
        """Return which tokens are less than `window` apart: bool [length, length]."""
        index = torch.arange(length, device=self._device)
        return (index[:, None] - index).abs() < window
