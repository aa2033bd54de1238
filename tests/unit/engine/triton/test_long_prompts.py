"""Attention of long chunks of prompts: pieces that are merged, and the kernel over descriptors."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.loader import load_spec
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.specs import one_layer

prompts = pytest.importorskip("services.engine.model.attention.long_prompts")
kernels = pytest.importorskip("services.engine.model.attention.prompt_kernels")
fp8_pages = pytest.importorskip("services.engine.model.attention.fp8_pages")
fp8_rows = pytest.importorskip("tests.unit.engine.triton.fp8_rows")
wide = pytest.importorskip("services.engine.model.attention.wide_kernel")
chunks = pytest.importorskip("services.engine.model.attention.prompt_chunk")

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
PAGE = 64
SCALE = 0.3


def make_chunk(
    rows: int,
    prefix: int,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    *,
    has_sinks: bool = False,
    has_keys: bool = True,
) -> Any:
    """Return a chunk whose keys and values are in pages; slots behind the context hold NaN."""
    torch.manual_seed(0)
    context, (num_heads, kv_heads) = rows + prefix, heads
    pages = -(-context // PAGE) + 2
    table = torch.randperm(pages).to(torch.int32)[: pages - 2]
    stored = []
    for _ in range(2):
        tokens = torch.full((len(table) * PAGE, kv_heads, head_dim), torch.nan)
        tokens[:context] = torch.randn(context, kv_heads, head_dim)
        each = torch.full((pages, PAGE, kv_heads, head_dim), torch.nan)
        each[table.long()] = tokens.view(len(table), PAGE, kv_heads, head_dim)
        stored.append((each, tokens[prefix:context]))
    (key_pages, keys), (value_pages, values) = stored
    wide_rows = torch.randn(rows, num_heads + 3, head_dim)  # its rows have gaps
    return chunks.PromptChunk(
        wide_rows[:, :num_heads],
        keys if has_keys else None,
        values if has_keys else None,
        key_pages,
        value_pages,
        table,
        context,
        torch.linspace(-2, 3, num_heads) if has_sinks else None,
        torch.full((rows, num_heads, head_dim), torch.nan),
    )


def expected(chunk: Any) -> Tensor:
    """Return the chunk's attention by its definition, [n, heads, width]."""
    rows, heads, _ = chunk.queries.shape
    keys, values = (
        pages[chunk.table.long()].flatten(0, 1)[: chunk.context].transpose(0, 1)
        for pages in (chunk.key_pages, chunk.value_pages)
    )
    group = heads // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = chunk.queries.transpose(0, 1) @ keys.transpose(1, 2) * SCALE
    seen = torch.ones(rows, chunk.context, dtype=torch.bool).tril(chunk.prefix)
    scores = scores.masked_fill(~seen, -torch.inf)
    if chunk.sinks is not None:
        sinks = chunk.sinks[:, None, None].expand(heads, rows, 1)
        scores = torch.cat((scores, sinks), dim=2)
    weights = scores.softmax(2)[..., : chunk.context]
    attended: Tensor = (weights @ values).transpose(0, 1)
    return attended


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("has_keys", [False, True])
@pytest.mark.parametrize("prefix", [0, 40, 64, 330])
def test_merged_pieces_equal_the_whole(prefix: int, has_keys: bool, has_sinks: bool) -> None:
    """The longest prefix has four pieces of which the last is not full."""
    chunk = make_chunk(37, prefix, has_sinks=has_sinks, has_keys=has_keys)
    prompts.InParts(SCALE, 100).attend(chunk)
    torch.testing.assert_close(chunk.out, expected(chunk), atol=1e-5, rtol=1e-5)


def test_half_precision_is_rounded_once_for_many_pieces() -> None:
    """Rounding each merged part would add the error of twenty roundings."""
    exact = make_chunk(16, 640)
    half = replace(
        exact,
        **{
            name: getattr(exact, name).to(torch.float16)
            for name in ("queries", "keys", "values", "key_pages", "value_pages", "out")
        },
    )
    prompts.InParts(SCALE, 32).attend(half)
    torch.testing.assert_close(half.out.float(), expected(exact), atol=2e-3, rtol=2e-3)


def test_cudnn_computes_the_parts_that_it_has_plans_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for another size would be built in the middle of a request."""
    seen: list[tuple[int, int, bool]] = []

    def by_cudnn(
        queries: Tensor, keys: Tensor, values: Tensor, scale: float, *, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        seen.append((len(queries), len(keys), is_causal))
        part: tuple[Tensor, Tensor] = prompts.attend_part(
            queries, keys, values, scale, is_causal=is_causal
        )
        return part

    monkeypatch.setattr(prompts, "attend_part_by_cudnn", by_cudnn)
    way = prompts.InParts(SCALE, 128, unit=32)
    way.prepare(make_chunk(32, 200))
    plans = {*seen, (32, 32, True)}
    assert plans == {(32, 32, True), *((32, count, False) for count in (32, 64, 96, 128))}
    seen.clear()
    for rows, prefix in ((32, 0), (32, 200), (32, 321), (31, 64)):
        chunk = make_chunk(rows, prefix)
        way.attend(chunk)
        torch.testing.assert_close(chunk.out, expected(chunk), atol=1e-5, rtol=1e-5)
    own, two = (32, 32, True), (32, 64, False)
    assert seen == [own, own, (32, 128, False), two, own, *((32, 128, False),) * 2, two]
    assert set(seen) <= plans


@pytest.mark.parametrize("prefix", [0, 330])
def test_merged_pieces_of_fp8_pages_equal_the_whole(prefix: int) -> None:
    chunk = in_fp8(make_chunk(37, prefix, has_sinks=True, has_keys=False))
    prompts.InParts(SCALE, 100).attend(chunk)
    pages = chunk.key_pages, chunk.value_pages
    key_pages, value_pages = map(fp8_pages.decoded_pages, pages)
    whole = expected(replace(chunk, key_pages=key_pages, value_pages=value_pages))
    torch.testing.assert_close(chunk.out, whole, atol=1e-5, rtol=1e-5)


def in_fp8(chunk: Any) -> Any:
    """Return a chunk whose pages are in FP8."""
    key_pages, value_pages = (
        fp8_rows.packed_pages(each.nan_to_num()) for each in (chunk.key_pages, chunk.value_pages)
    )
    return replace(chunk, key_pages=key_pages, value_pages=value_pages)


@pytest.mark.parametrize("tile", wide.WIDE_TILES, ids=str)
@pytest.mark.parametrize(
    ("rows", "prefix", "heads", "has_sinks"),
    [
        (70, 0, (4, 2), False),
        (5, 130, (6, 2), True),
        (130, 64, (8, 1), False),
        (1, 64, (2, 2), True),
    ],
)
def test_wide_kernel_equals_the_definition(
    rows: int, prefix: int, heads: tuple[int, int], has_sinks: bool, tile: Any
) -> None:
    chunk = make_chunk(rows, prefix, heads, has_sinks=has_sinks)
    wide.attend_widely(chunk, SCALE, tile)
    torch.testing.assert_close(chunk.out, expected(chunk), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("first", [0, 60, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_are_gathered_from_their_pages(first: int, dtype: torch.dtype) -> None:
    chunk = make_chunk(20, 180, (3, 3), 80)
    out = torch.empty(60, 3, 80, dtype=dtype)
    kernels.gather_tokens(chunk.key_pages, chunk.table, first, out)
    tokens = chunk.key_pages[chunk.table.long()].flatten(0, 1)
    assert torch.equal(out, tokens[first : first + 60].to(dtype))


@pytest.mark.parametrize("first", [0, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_tokens_are_gathered_from_fp8_pages(first: int, dtype: torch.dtype) -> None:
    chunk = in_fp8(make_chunk(20, 180, (3, 3), 80))
    out = torch.empty(60, 3, 80, dtype=dtype)
    kernels.gather_tokens(chunk.key_pages, chunk.table, first, out)
    tokens = fp8_pages.decoded_pages(chunk.key_pages)[chunk.table.long()].flatten(0, 1)
    assert torch.equal(out, tokens[first : first + 60].to(dtype))


@pytest.fixture
def layer(tmp_path: Path) -> AttentionSpec:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    return plain_layer(load_spec(tmp_path)).attention(0)


def plain_layer(spec: ModelSpec) -> ModelSpec:
    return one_layer(spec, num_heads=4, num_kv_heads=2, head_dim=64, scale=SCALE)


def on_gpu(**changes: object) -> Any:
    known = prompts.PromptKernels(
        PAGE, torch.bfloat16, torch.bfloat16, has_flash=True, has_descriptors=True
    )
    return replace(known, **changes)


def test_layers_have_the_ways_that_compute_them(layer: AttentionSpec) -> None:
    def ways(kernels: Any = None, **changes: Any) -> list[str]:
        found = (kernels or on_gpu()).ways(replace(layer, **changes), 4096)
        return [str(way) for way in found]

    tma = [f"our kernel with TMA, {size}" for size in ("128x64", "64x64")]
    parts = ["flash attention in parts", "cuDNN in parts"]
    assert ways() == ways(has_sinks=True) == [*tma, *parts]
    assert ways(head_dim=96) == parts
    assert ways(value_width=128) == tma
    assert ways(head_dim=256) == ["our kernel with TMA, 128x32", *parts]
    assert ways(head_dim=512) == ways(cap=30.0) == ways(window=128) == ways(alibi_bias=8.0) == []
    assert ways(on_gpu(has_descriptors=False)) == parts[:1]
    assert ways(on_gpu(has_flash=False)) == tma
    assert ways(on_gpu(kv_dtype=torch.float8_e4m3fn)) == parts


def test_pieces_of_a_prefix_fit_the_reserved_memory(layer: AttentionSpec) -> None:
    large = replace(layer, num_heads=128, num_kv_heads=128, head_dim=256)
    *_, way = on_gpu(has_descriptors=False).ways(large, 4096)
    assert way.piece == 1024  # 128 MiB: fewer tokens would waste the launch
    *_, way = on_gpu(has_descriptors=False).ways(replace(layer, num_kv_heads=8), 4096)
    assert way.piece * 2 * 8 * 64 * 2 <= 64 << 20 < (way.piece + 1024) * 2 * 8 * 64 * 2


def with_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pieces of prefixes be so small that a CPU computes three of them at once."""
    monkeypatch.setattr(prompts, "_GATHERED_BYTES", 1)
    monkeypatch.setattr(prompts, "_GATHERED_UNIT", PAGE)


def choose_last(
    candidates: Mapping[Any, list[Callable[[], Tensor]]], usual: None, what: str
) -> Any:
    """Stand for the times of a GPU; all candidates compute the same."""
    first, *others = [launches[0]().clone() for launches in candidates.values()]
    for output in others:
        torch.testing.assert_close(output, first, atol=1e-4, rtol=1e-4)
    *_, last = candidates
    return last


def test_measured_way_serves_long_chunks_alone(
    layer: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def choose(candidates: Mapping[Any, list[Callable[[], Tensor]]], usual: None, what: str) -> Any:
        measured.append(what)
        return choose_last(candidates, usual, what)

    monkeypatch.setattr(prompts, "fastest", choose)
    monkeypatch.setattr(prompts, "_LEAST_ROWS", 16)
    monkeypatch.setattr(prompts, "_LEAST_PAIRS", 16 * 128)
    known = on_gpu(
        dtype=torch.float32, kv_dtype=torch.float32, has_flash=False, has_descriptors=True
    )
    windowed = replace(layer, window=40)
    ways = prompts.LongPrompts({0: layer, 1: windowed, 2: replace(layer)}, known)
    assert ways.way(0, 32, 128) is None
    ways.measure(32, 128, CPU)
    assert measured == ["attention of 32 tokens behind 96"]
    assert isinstance(ways.way(0, 32, 128), prompts.Widely)
    assert ways.way(2, 16, 128) is ways.way(0, 32, 128)
    assert ways.way(0, 64, 64) is ways.way(1, 32, 128) is None
    lengths = ((15, 200), (16, 100), (16, 128))
    assert [prompts.is_long(*each) for each in lengths] == [False, False, True]


def test_ways_over_fp8_pages_are_compared_with_the_usual_kernel(
    layer: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def choose(candidates: Mapping[Any, list[Callable[[], Tensor]]], usual: None, what: str) -> Any:
        first, other = [launches[0]().clone() for launches in candidates.values()]
        torch.testing.assert_close(other, first, atol=2e-3, rtol=2e-3)
        return [*candidates][1]

    monkeypatch.setattr(prompts, "fastest", choose)
    monkeypatch.setattr(prompts, "_LEAST_ROWS", 16)
    monkeypatch.setattr(prompts, "_LEAST_PAIRS", 16 * 128)
    with_small_pieces(monkeypatch)
    known = on_gpu(dtype=torch.float32, kv_dtype=fp8_pages.KV_FP8, has_descriptors=False)
    ways = prompts.LongPrompts({0: layer}, known)
    ways.measure(32, 128, CPU)
    assert isinstance(ways.way(0, 32, 128), prompts.InParts)


def test_prompts_of_layers_with_sinks_are_measured_with_their_sinks(
    layer: AttentionSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flash attention has none, so it can't be what the others are compared with."""
    monkeypatch.setattr(prompts, "fastest", choose_last)
    monkeypatch.setattr(prompts, "_LEAST_ROWS", 16)
    monkeypatch.setattr(prompts, "_LEAST_PAIRS", 16 * 16)
    with_small_pieces(monkeypatch)
    known = on_gpu(dtype=torch.float32, kv_dtype=torch.float32, has_descriptors=False)
    ways = prompts.LongPrompts({0: replace(layer, has_sinks=True)}, known)
    ways.measure(32, 128, CPU)
    assert isinstance(ways.way(0, 32, 32), prompts.InParts)
    assert isinstance(ways.way(0, 32, 128), prompts.InParts)
