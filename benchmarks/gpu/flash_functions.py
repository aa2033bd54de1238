"""Functions of the package flash_attn for a peer that imports it, by torch and by our kernel.

Built for one release of torch, the package is larger than a bundle may be. torch has its kernel for
whole prompts. Our kernel reads pages; in decodes it takes as long as a copy of the keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.engine.model.attention.flash import flash_attention
from services.engine.model.attention.paged_kernels import PagedRows, PagedShape, attend_pages

__all__ = ["flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_varlen_func(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    max_seqlen_q: int,
    cu_seqlens_q: Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: Tensor,
    softmax_scale: float,
    causal: bool,
    block_table: Tensor | None,
) -> Tensor:
    """Return causal attention of packed sequences, [tokens, heads, head_dim].

    Without `block_table`, keys and values are packed like the queries; with it, they are pages
    [pages, page, kv_heads, head_dim].
    """
    assert causal
    if block_table is None:
        return flash_attention(
            queries, keys, values, cu_seqlens_q, max_seqlen_q, softmax_scale, window=0
        )
    rows = PagedRows(
        cu_seqlens_q, cu_seqlens_k.diff(), block_table, None, max_seqlen_q, max_seqlen_k
    )
    return _attend(queries, keys, values, rows, softmax_scale)


def flash_attn_with_kvcache(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """Return the attention of one query of each sequence, [sequences, 1, heads, head_dim].

    queries: [sequences, 1, heads, head_dim]; keys, values: [pages, page, kv_heads, head_dim].
    """
    assert causal
    count = len(queries)
    starts = torch.arange(count + 1, dtype=torch.int32, device=queries.device)
    rows = PagedRows(starts, cache_seqlens, block_table, None, longest=1)
    return _attend(queries.squeeze(1), keys, values, rows, softmax_scale).unsqueeze(1)


def _attend(queries: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float) -> Tensor:
    _, page, kv_heads, head_dim = keys.shape
    count, heads = queries.shape[:2]
    shape = PagedShape(heads, kv_heads, head_dim, head_dim, page, scale, 0.0, 0)
    out = queries.new_empty(count, heads * head_dim)
    attend_pages(shape, rows, queries, keys, values, None, out)
    return out.view(count, heads, head_dim)
