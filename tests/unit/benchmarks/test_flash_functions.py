"""The attention functions that a peer gets, in Triton's interpreter."""

import os

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

flash_functions = pytest.importorskip("benchmarks.gpu.flash_functions")
pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)
PAGE, HEADS, KV_HEADS, WIDTH = 256, 4, 2, 16
SCALE = WIDTH**-0.5


class Cache:
    """Keys and values of two sequences, in pages in any order."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.keys, self.values = (torch.randn(5, PAGE, KV_HEADS, WIDTH) for _ in range(2))
        self.lengths = (300, 20)
        self.tables = torch.tensor([[3, 1], [2, -1]], dtype=torch.int32)

    def expected(self, sequence: int, queries: Tensor) -> Tensor:
        """Return the attention of the last tokens of a sequence, [rows, heads, width]."""
        length = self.lengths[sequence]
        pages = self.tables[sequence].long().clamp(min=0)
        keys, values = (
            each[pages].flatten(0, 1)[:length].transpose(0, 1)[None]
            for each in (self.keys, self.values)
        )
        seen = torch.ones(len(queries), length, dtype=torch.bool).tril(length - len(queries))
        attended = scaled_dot_product_attention(
            queries.transpose(0, 1)[None], keys, values, seen, scale=SCALE, enable_gqa=True
        )
        return attended[0].transpose(0, 1)


def test_decodes_read_pages() -> None:
    cache, queries = Cache(), torch.randn(2, 1, HEADS, WIDTH)
    out = flash_functions.flash_attn_with_kvcache(
        queries,
        cache.keys,
        cache.values,
        cache_seqlens=torch.tensor(cache.lengths, dtype=torch.int32),
        block_table=cache.tables,
        softmax_scale=SCALE,
        causal=True,
    )
    expected = torch.stack([cache.expected(each, queries[each]) for each in range(2)])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_chunks_behind_a_prefix_read_pages() -> None:
    cache, queries = Cache(), torch.randn(5 + 20, HEADS, WIDTH)
    out = flash_functions.flash_attn_varlen_func(
        queries,
        cache.keys,
        cache.values,
        max_seqlen_q=20,
        cu_seqlens_q=torch.tensor([0, 5, 25], dtype=torch.int32),
        max_seqlen_k=300,
        cu_seqlens_k=torch.tensor([0, 300, 320], dtype=torch.int32),
        softmax_scale=SCALE,
        causal=True,
        block_table=cache.tables,
    )
    expected = torch.cat([cache.expected(0, queries[:5]), cache.expected(1, queries[5:])])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
