"""Attention with linear biases (ALiBi, https://arxiv.org/abs/2108.12409) over pages of keys.

A bias of slope * (key's position - query's position) has the same effect on a query's weights as
slope * key's position, since the weights are normalized. The bias is a product of two more columns:
ones in a query; in a key, the bias and the error of its rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn

from services.engine.model.transformers_code.calls import attend
from services.engine.model.transformers_code.positions import Positions

__all__ = ["AlibiAttention"]


class AlibiAttention:
    """Attention of all modules of a model, with a slope for each head."""

    def __init__(self, slopes: Tensor, positions: Positions) -> None:
        """slopes: float32 [heads]."""
        self._slopes = slopes
        self._positions = positions

    @staticmethod
    def of(layers: Any, positions: Positions) -> "AlibiAttention":
        """Return the attention of BLOOM's or MPT's layers."""
        with torch.device("cpu"):
            if hasattr(layers, "build_alibi_tensor"):
                biases = layers.build_alibi_tensor(torch.ones(1, 2), layers.num_heads, torch.float)
            else:
                biases = layers.build_mpt_alibi_tensor(layers.num_heads, 2)
        return AlibiAttention((biases[:, 0, 1] - biases[:, 0, 0]).float(), positions)

    def bloom(
        self, module: Any, hidden: Tensor, residual: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Run in place of the forward pass of BLOOM's attention."""
        query, key, value = module._reshape(module.query_key_value(hidden))
        out = self._attend(module, query, key, value, module.inv_norm_factor)
        return module.dense(out) + residual, None

    def mpt(self, module: Any, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        """Run in place of the forward pass of MPT's attention."""
        rows = module.Wqkv(hidden)
        if module.clip_qkv:
            rows = rows.clamp(-module.clip_qkv, module.clip_qkv)
        shape = (*rows.shape[:2], module.n_heads, module.head_dim)
        parts = rows.chunk(3, dim=2)
        query, key, value = (part.reshape(shape).transpose(1, 2) for part in parts)
        out = self._attend(module, query, key, value, module.softmax_scale)
        return module.out_proj(out), None

    def _attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, scale: float
    ) -> Tensor:
        """Return [1, tokens, heads * width]."""
        slopes, positions = self._slopes.to(key.device), self._positions.current
        bias = (slopes[:, None] * positions)[None, :, :, None]
        rounded = bias.to(key.dtype)
        key = torch.cat((key, rounded, (bias - rounded.float()).to(key.dtype)), dim=3)
        ones = query.new_full((*query.shape[:3], 2), 1 / scale)
        query = torch.cat((query, ones), dim=3)
        out, _ = attend(module, query, key, value, scaling=scale)
        return out.flatten(2)
