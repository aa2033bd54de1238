"""Attention of prompt chunks behind cached prefixes: the kernels of the engine, and of others.

Each one is timed with all that it needs: keys gathered from their pages, and parts merged. The
engine chooses among its own at start (`services/engine/model/attention/long_prompts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.context import Context, Row, Rows
from benchmarks.gpu.timing import case
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.attention.long_prompts import InParts, PromptKernels, Way
from services.engine.model.attention.paged_kernels import PagedRows, PagedShape, attend_pages
from services.engine.model.attention.prompt_chunk import PromptChunk
from services.engine.model.checkpoint.family import QkNorm

__all__ = ["compare_prompt_attention"]

_PAGE = 64
_CHUNKS = (
    (2048, 0),
    (4096, 0),
    (8192, 0),
    (512, 8192),
    (4096, 4096),
    (4096, 28672),
    (4096, 61440),
    (4096, 126976),
    (8192, 122880),
)
"""Rows of a chunk, and tokens of the prefix behind which it comes, to contexts of 128K"""
_DRY_CHUNKS = ((64, 0), (64, 64))
_CHECKED_ROWS = 64
_MOST_ERROR = 0.02
"""Largest difference from float32, of values near 1"""
_WITH_DESCRIPTORS = (9, 0)
"""Least compute capability with a tensor memory accelerator"""

Call = Callable[[], object]


def compare_prompt_attention(context: Context) -> Rows:
    """Yield time, rate and error of each way, by chunk."""
    heads, kv_heads, head_dim = context.size((32, 8, 128), (4, 2, 64))
    spec = AttentionSpec(
        heads,
        kv_heads,
        head_dim,
        scale=head_dim**-0.5,
        cap=0.0,
        window=0,
        rotary=None,
        qkv_bias=False,
        output_bias=False,
        has_sinks=False,
        qk_norm=QkNorm.NONE,
        gate=None,
    )
    for rows, prefix in context.size(_CHUNKS, _DRY_CHUNKS):
        chunk = _random_chunk(context, spec, rows, prefix)
        names: Row = {"rows": rows, "behind": prefix}
        exact = _exact(chunk, spec.scale)
        operations = 4 * heads * head_dim * (rows * prefix + rows**2 / 2)
        for how, call in _calls(context, spec, chunk):
            row = case(
                context,
                {**names, "how": how},
                lambda: [call] * 3,  # noqa: B023
                operations=operations,
            )
            yield row if "failure" in row else row | _error(call, exact)


def _random_chunk(context: Context, spec: AttentionSpec, rows: int, prefix: int) -> PromptChunk:
    pages = -(-(rows + prefix) // _PAGE)
    device = context.device

    def random(*size: int) -> Tensor:
        return torch.randn(*size, device=device).to(context.dtype)

    cache = (pages, _PAGE, spec.num_kv_heads, spec.head_dim)
    queries = random(rows, spec.num_heads, spec.head_dim)
    key_pages, value_pages = random(*cache), random(*cache)
    table = torch.randperm(pages, device=device).to(torch.int32)
    keys, values = (
        each[table.long()].flatten(0, 1)[prefix : prefix + rows]
        for each in (key_pages, value_pages)
    )
    out = torch.empty_like(queries)
    return PromptChunk(
        queries, keys, values, key_pages, value_pages, table, rows + prefix, None, out
    )


def _calls(context: Context, spec: AttentionSpec, chunk: PromptChunk) -> Iterator[tuple[str, Call]]:
    """Yield the name and the call of each way; the result is [rows, heads, head_dim]."""
    yield "our kernel over pages", _usual(spec, chunk)
    on_gpu, dtype = context.on_gpu, context.dtype
    has_descriptors = not on_gpu or torch.cuda.get_device_capability() >= _WITH_DESCRIPTORS
    kernels = PromptKernels(_PAGE, dtype, dtype, has_flash=True, has_descriptors=has_descriptors)
    for way in kernels.ways(spec, len(chunk.queries)):
        if on_gpu or not (isinstance(way, InParts) and way.unit):  # cuDNN has no kernels for CPUs
            yield str(way), partial(_attend, way, chunk)
    if not on_gpu:
        return
    bounds = {
        tokens: torch.tensor([0, tokens], dtype=torch.int32, device=context.device)
        for tokens in (len(chunk.queries), chunk.context)
    }
    yield "torch's flash attention, keys gathered", lambda: _flash(chunk, spec.scale, bounds)
    if "block_table" in str(torch.ops.aten._flash_attention_forward.default._schema):
        yield "torch's flash attention over pages", lambda: _flash_pages(chunk, spec.scale, bounds)
    if not chunk.prefix:
        yield "cuDNN by scaled_dot_product_attention", lambda: _cudnn(chunk, spec.scale)
    for module in ("flash_attn_interface", "flash_attn.cute"):
        try:
            attend = import_module(module).flash_attn_func
        except (ImportError, AttributeError):
            continue
        yield f"{module}, keys gathered", partial(_other_flash, attend, chunk, spec.scale)


def _usual(spec: AttentionSpec, chunk: PromptChunk) -> Call:
    """Return the call of the kernel that computes short chunks, too."""
    count = len(chunk.queries)
    bounds = torch.tensor([0, count, chunk.context], dtype=torch.int32, device=chunk.out.device)
    rows = PagedRows(bounds[:2], bounds[2:], chunk.table[None], None, count, chunk.context)
    shape = PagedShape.of(spec, _PAGE)

    def attend() -> Tensor:
        attend_pages(
            shape, rows, chunk.queries, chunk.key_pages, chunk.value_pages, None, chunk.out
        )
        return chunk.out

    return attend


def _attend(way: Way, chunk: PromptChunk) -> Tensor:
    way.attend(chunk)
    return chunk.out


def _gathered(chunk: PromptChunk) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of the context in their order, [tokens, kv_heads, width]."""
    table = chunk.table.long()
    keys, values = (
        pages[table].flatten(0, 1)[: chunk.context]
        for pages in (chunk.key_pages, chunk.value_pages)
    )
    return keys, values


def _flash(chunk: PromptChunk, scale: float, bounds: Mapping[int, Tensor]) -> Tensor:
    count, context = len(chunk.queries), chunk.context
    attended = torch.ops.aten._flash_attention_forward(
        chunk.queries,
        *_gathered(chunk),
        bounds[count],
        bounds[context],
        count,
        context,
        0.0,
        True,
        False,
        scale=scale,
    )[0]
    assert isinstance(attended, Tensor)
    return attended


def _flash_pages(chunk: PromptChunk, scale: float, bounds: Mapping[int, Tensor]) -> Tensor:
    count, context = len(chunk.queries), chunk.context
    attended = torch.ops.aten._flash_attention_forward(
        chunk.queries,
        chunk.key_pages,
        chunk.value_pages,
        bounds[count],
        bounds[context],
        count,
        context,
        0.0,
        True,
        False,
        scale=scale,
        seqused_k=bounds[context][1:],
        block_table=chunk.table[None],
    )[0]
    assert isinstance(attended, Tensor)
    return attended


def _by_heads(rows: Tensor, repeats: int = 1) -> Tensor:
    """Return [tokens, heads, width] as [1, heads * repeats, tokens, width], contiguous."""
    return rows.transpose(0, 1).repeat_interleave(repeats, 0)[None].contiguous()


def _cudnn(chunk: PromptChunk, scale: float) -> Tensor:
    keys, values = _gathered(chunk)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        attended = scaled_dot_product_attention(
            _by_heads(chunk.queries),
            _by_heads(keys),
            _by_heads(values),
            is_causal=True,
            scale=scale,
            enable_gqa=True,
        )
    return attended[0].transpose(0, 1)


def _other_flash(attend: Callable[..., object], chunk: PromptChunk, scale: float) -> Tensor:
    """Call a release of FlashAttention, which aligns the mask with the last key."""
    keys, values = (each[None] for each in _gathered(chunk))
    found = attend(chunk.queries[None], keys, values, softmax_scale=scale, causal=True)
    out = found[0] if isinstance(found, tuple) else found
    assert isinstance(out, Tensor)
    return out[0]


def _exact(chunk: PromptChunk, scale: float) -> Tensor:
    """Return the attention of the last rows in float32, [rows, heads, head_dim]."""
    last = min(len(chunk.queries), _CHECKED_ROWS)
    queries = _by_heads(chunk.queries[-last:].float())
    repeats = chunk.queries.shape[1] // chunk.key_pages.shape[2]
    keys, values = (_by_heads(each.float(), repeats) for each in _gathered(chunk))
    seen = torch.ones(last, chunk.context, dtype=torch.bool, device=queries.device)
    with sdpa_kernel(SDPBackend.MATH):
        attended = scaled_dot_product_attention(
            queries, keys, values, seen.tril(chunk.context - last), scale=scale
        )
    return attended[0].transpose(0, 1)


def _error(call: Call, exact: Tensor) -> Row:
    found = call()
    assert isinstance(found, Tensor)
    error = (found[-len(exact) :].float() - exact).abs().max().item()
    return {"error": error, "ok": error <= _MOST_ERROR}
