"""Attention of prompt chunks behind cached prefixes: our kernel beside what torch and others have.

Each way is timed with all that it needs: keys gathered from their pages, and parts merged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.context import Context, Row, Rows
from benchmarks.gpu.timing import case
from services.engine.model.attention.paged_kernels import PagedRows, PagedShape, attend_pages

__all__ = ["compare_prompt_attention"]

_PAGE = 64
_CHUNKS = ((4096, 0), (2048, 0), (512, 8192), (4096, 4096), (4096, 28672), (4096, 61440))
"""Rows of a chunk, and tokens of the prefix behind which it comes"""
_DRY_CHUNKS = ((64, 0), (64, 64))
_CHECKED_ROWS = 64
_MOST_ERROR = 0.02
"""Largest difference from float32, of values near 1"""

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of one sequence, over keys and values in pages."""

    shape: PagedShape
    prefix: int
    queries: Tensor
    """[rows, heads, head_dim]"""
    keys: Tensor
    """[pages, page, kv_heads, head_dim]"""
    values: Tensor
    table: Tensor
    """int32 [1, pages], the order of the pages"""
    starts: Mapping[int, Tensor]
    """Bounds of one sequence by its tokens, int32 [2]; a graph must not copy them from the host"""

    @property
    def rows(self) -> int:
        return len(self.queries)

    @property
    def context(self) -> int:
        return self.prefix + self.rows

    def gathered(self, pages: Tensor) -> Tensor:
        """Return the keys or values of the context in their order, [tokens, kv_heads, width]."""
        return pages[self.table[0].long()].flatten(0, 1)[: self.context]

    @property
    def operations(self) -> float:
        pairs = self.rows * self.prefix + self.rows**2 / 2
        return 4 * self.shape.heads * self.shape.head_dim * pairs


def compare_prompt_attention(context: Context) -> Rows:
    """Yield time, rate and error of each way, by chunk."""
    heads, kv_heads, head_dim = context.size((32, 8, 128), (4, 2, 16))
    shape = PagedShape(heads, kv_heads, head_dim, head_dim, _PAGE, head_dim**-0.5, 0.0, 0)
    for rows, prefix in context.size(_CHUNKS, _DRY_CHUNKS):
        chunk = _random_chunk(context, shape, rows, prefix)
        names: Row = {"rows": rows, "behind": prefix}
        exact = _exact(chunk)
        for how, call in _ways(context, chunk):
            row = case(
                context,
                {**names, "how": how},
                lambda: [call] * 3,  # noqa: B023
                operations=chunk.operations,
            )
            yield row if "failure" in row else row | _error(call, exact)


def _random_chunk(context: Context, shape: PagedShape, rows: int, prefix: int) -> _Chunk:
    pages = -(-(rows + prefix) // _PAGE)
    device = context.device

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(context.dtype)

    cache = (pages, _PAGE, shape.kv_heads, shape.head_dim)
    order = torch.randperm(pages, device=device).to(torch.int32)[None]
    starts = {
        tokens: torch.tensor([0, tokens], dtype=torch.int32, device=device)
        for tokens in (rows, prefix, rows + prefix)
    }
    queries = random(rows, shape.heads, shape.head_dim)
    return _Chunk(shape, prefix, queries, random(*cache), random(*cache), order, starts)


def _ways(context: Context, chunk: _Chunk) -> Iterator[tuple[str, Call]]:
    """Yield the name and the call of each way; the result is [rows, heads * head_dim]."""
    yield "our kernel over pages", lambda: _ours(chunk)
    if not context.on_gpu:
        return
    yield "torch's flash attention, keys gathered", lambda: _flash(chunk)
    yield "torch's flash attention in two parts", lambda: _flash_in_parts(chunk)
    if "block_table" in str(torch.ops.aten._flash_attention_forward.default._schema):
        yield "torch's flash attention over pages", lambda: _flash_pages(chunk)
    yield "cuDNN in two parts, keys repeated", lambda: _cudnn_in_parts(chunk)
    if not chunk.prefix:
        yield "cuDNN by scaled_dot_product_attention", lambda: _cudnn(chunk)
    for module in ("flash_attn_interface", "flash_attn.cute"):
        try:
            attend = import_module(module).flash_attn_func
        except (ImportError, AttributeError):
            continue
        yield f"{module}, keys gathered", partial(_other_flash, attend, chunk)


def _ours(chunk: _Chunk) -> Tensor:
    lengths = chunk.starts[chunk.context][1:]
    rows = PagedRows(
        chunk.starts[chunk.rows], lengths, chunk.table, None, chunk.rows, chunk.context
    )
    out = chunk.queries.new_empty(chunk.rows, chunk.shape.heads * chunk.shape.head_dim)
    attend_pages(chunk.shape, rows, chunk.queries, chunk.keys, chunk.values, None, out)
    return out


def _flash_call(
    chunk: _Chunk, keys: Tensor, values: Tensor, *, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Return attention [rows, heads, width] and log-sums [heads, rows] over some keys."""
    result = torch.ops.aten._flash_attention_forward(
        chunk.queries,
        keys,
        values,
        chunk.starts[chunk.rows],
        chunk.starts[len(keys)],
        chunk.rows,
        len(keys),
        0.0,
        is_causal,
        False,
        scale=chunk.shape.scale,
    )
    return result[0], result[1]


def _flash(chunk: _Chunk) -> Tensor:
    keys, values = chunk.gathered(chunk.keys), chunk.gathered(chunk.values)
    return _flash_call(chunk, keys, values, is_causal=True)[0].flatten(1)


def _flash_in_parts(chunk: _Chunk) -> Tensor:
    """Attend to the prefix without a mask and to the chunk with one, and merge by log-sums."""
    keys, values, prefix = chunk.gathered(chunk.keys), chunk.gathered(chunk.values), chunk.prefix
    own, own_sums = _flash_call(chunk, keys[prefix:], values[prefix:], is_causal=True)
    if not prefix:
        return own.flatten(1)
    past, past_sums = _flash_call(chunk, keys[:prefix], values[:prefix], is_causal=False)
    return _merged(own, own_sums.T, past, past_sums.T)


def _flash_pages(chunk: _Chunk) -> Tensor:
    result = torch.ops.aten._flash_attention_forward(
        chunk.queries,
        chunk.keys,
        chunk.values,
        chunk.starts[chunk.rows],
        chunk.starts[chunk.context],
        chunk.rows,
        chunk.context,
        0.0,
        True,
        False,
        scale=chunk.shape.scale,
        seqused_k=chunk.starts[chunk.context][1:],
        block_table=chunk.table,
    )[0]
    assert isinstance(result, Tensor)
    return result.flatten(1)


def _by_heads(rows: Tensor, repeats: int = 1) -> Tensor:
    """Return [tokens, heads, width] as [1, heads * repeats, tokens, width], contiguous."""
    return rows.transpose(0, 1).repeat_interleave(repeats, 0)[None].contiguous()


def _cudnn_call(
    queries: Tensor, keys: Tensor, values: Tensor, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    result = torch.ops.aten._scaled_dot_product_cudnn_attention(
        queries, keys, values, None, True, 0.0, is_causal, False, scale=scale
    )
    return result[0][0].transpose(0, 1), result[1].view(queries.shape[1], -1)


def _cudnn_in_parts(chunk: _Chunk) -> Tensor:
    repeats, prefix, scale = (
        chunk.shape.heads // chunk.shape.kv_heads,
        chunk.prefix,
        chunk.shape.scale,
    )
    queries = _by_heads(chunk.queries)
    keys, values = (
        _by_heads(chunk.gathered(pages), repeats) for pages in (chunk.keys, chunk.values)
    )
    own, own_sums = _cudnn_call(
        queries, keys[:, :, prefix:], values[:, :, prefix:], scale, is_causal=True
    )
    if not prefix:
        return own.flatten(1)
    past, past_sums = _cudnn_call(
        queries, keys[:, :, :prefix], values[:, :, :prefix], scale, is_causal=False
    )
    return _merged(own, own_sums.T, past, past_sums.T)


def _cudnn(chunk: _Chunk) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attended = scaled_dot_product_attention(
            _by_heads(chunk.queries),
            _by_heads(chunk.gathered(chunk.keys)),
            _by_heads(chunk.gathered(chunk.values)),
            is_causal=True,
            scale=chunk.shape.scale,
            enable_gqa=True,
        )
    return attended[0].transpose(0, 1).flatten(1)


def _other_flash(attend: Callable[..., object], chunk: _Chunk) -> Tensor:
    """Call a release of FlashAttention, which aligns the mask with the last key."""
    keys, values = chunk.gathered(chunk.keys)[None], chunk.gathered(chunk.values)[None]
    found = attend(chunk.queries[None], keys, values, softmax_scale=chunk.shape.scale, causal=True)
    out = found[0] if isinstance(found, tuple) else found
    assert isinstance(out, Tensor)
    return out[0].flatten(1)


def _merged(own: Tensor, own_sums: Tensor, past: Tensor, past_sums: Tensor) -> Tensor:
    """Merge two parts [rows, heads, width] by their log-sums [rows, heads]."""
    share = torch.sigmoid(own_sums - past_sums)[..., None]
    return torch.lerp(past.float(), own.float(), share).to(own.dtype).flatten(1)


def _exact(chunk: _Chunk) -> Tensor:
    """Return the attention of the last rows in float32, [rows, heads * head_dim]."""
    last = min(chunk.rows, _CHECKED_ROWS)
    queries = _by_heads(chunk.queries[-last:].float())
    repeats = chunk.shape.heads // chunk.shape.kv_heads
    keys, values = (
        _by_heads(chunk.gathered(pages).float(), repeats) for pages in (chunk.keys, chunk.values)
    )
    seen = torch.ones(last, chunk.context, dtype=torch.bool, device=queries.device)
    with sdpa_kernel(SDPBackend.MATH):
        attended = scaled_dot_product_attention(
            queries, keys, values, seen.tril(chunk.context - last), scale=chunk.shape.scale
        )
    return attended[0].transpose(0, 1).flatten(1)


def _error(call: Call, exact: Tensor) -> Row:
    found = call()
    assert isinstance(found, Tensor)
    error = (found[-len(exact) :].float() - exact).abs().max().item()
    return {"error": error, "ok": error <= _MOST_ERROR}
