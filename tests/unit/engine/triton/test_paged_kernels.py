"""Attention over pages in Triton's interpreter equals the torch backend."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from itertools import accumulate, chain, product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from services.engine.batch.step_batch import SharedPrefixes, StepBatch
from services.engine.model.architecture.distance import alibi_slopes
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import AttentionStep, KVCache
from services.engine.model.attention.torch_backend import TorchAttention
from services.engine.model.loader import load_spec
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.specs import one_layer

kernels = pytest.importorskip("services.engine.model.attention.paged_kernels")
fp8_pages = pytest.importorskip("services.engine.model.attention.fp8_pages")
fp8_rows = pytest.importorskip("tests.unit.engine.triton.fp8_rows")

CPU = torch.device("cpu")
PAGE = 64
NAN = 0x7F
"""Byte of a NaN in E4M3"""
FP8_ERROR = 2e-3
"""Largest difference from float32 over the same rounded keys: products are rounded to float16"""
DECODES = ((1, 1), (1, 64), (1, 65), (1, 300))
CHUNKS = ((5, 5), (1, 130), (20, 150))
"""(queries, context) of sequences"""

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    cap: float = 0.0
    has_sinks: bool = False
    alibi_bias: float = 0.0
    width: int = 5
    """Columns of the block tables; contexts are divided if there are more than 3"""
    value_dim: int = 0
    """Width of values; 0: that of keys"""

    def __str__(self) -> str:
        return "-".join(f"{value:g}" for value in dataclasses.astuple(self))


CASES = (
    Case(4, 2, 16),
    Case(3, 3, 32, window=20),
    Case(8, 1, 64, window=100, has_sinks=True),
    Case(2, 1, 256, cap=2.0),
    Case(8, 1, 512),
    Case(2, 1, 96, window=270, cap=2.0, has_sinks=True),
    Case(7, 1, 80, has_sinks=True),
    Case(4, 2, 48, value_dim=32),
    Case(8, 1, 32, window=100, has_sinks=True, value_dim=80),
    Case(6, 6, 32, alibi_bias=8.0),
    Case(8, 2, 64, window=100, has_sinks=True, alibi_bias=16.0),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path: Path = tmp_path_factory.mktemp("spec")
    make_checkpoint(path, CONFIGS["llama"])
    return load_spec(path)


class Layer:
    """One layer over random keys and values. Slots that no context covers hold NaN."""

    def __init__(
        self, base: ModelSpec, case: Case, dtype: torch.dtype, *, is_fp8: bool = False
    ) -> None:
        """is_fp8: let the kernel read pages in FP8, and the torch backend what they hold."""
        torch.manual_seed(3)
        self.case, self.dtype, self.is_fp8 = case, dtype, is_fp8
        self.spec = one_layer(
            base,
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            window=case.window,
            scale=case.head_dim**-0.5,
            cap=case.cap,
            has_sinks=case.has_sinks,
            value_width=case.value_dim,
            alibi_bias=case.alibi_bias,
        )
        self.sinks = torch.linspace(-2, 3, case.heads) if case.has_sinks else None
        self.slopes = alibi_slopes(case.heads, case.alibi_bias) if case.alibi_bias else None

    def run(
        self,
        spans: tuple[tuple[int, int], ...],
        images: bool = False,
        overflow: bool = False,
        shared: Sequence[int] | None = None,
        padding: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the kernel's output, and the torch backend's in float32.

        images: let some tokens of each chunk see each other. overflow: let a value of the first
        sequence be infinite, and one of its keys. shared: number of pages of each sequence's
        prefix, which sequences with the same number share, and the kernel reads once. padding:
        numbers of rows and of sequences to which a step of decodes and then chunks is padded.
        """
        batch = make_batch(spans, self.case.width)
        for length in set(shared or ()):
            sharers = [row for row, count in enumerate(shared or ()) if count == length]
            batch.block_tables[sharers, :length] = batch.block_tables[sharers[0], :length].clone()
        if images:
            batch = dataclasses.replace(batch, visible_ends=image_ends(spans))
        plain = TorchAttention(self.spec, torch.float32, CPU)
        cache = plain.allocate(int(batch.block_tables.max()) + 1, PAGE)
        for pages in (cache.keys[0], cache.values[0]):
            pages.fill_(torch.nan)
            for row, (_, context) in enumerate(spans):
                for column, page in enumerate(batch.block_tables[row].tolist()):
                    held = pages[page, :, : max(0, min(PAGE, context - column * PAGE))]
                    held.copy_(torch.randn(held.shape).to(self.dtype))
        if overflow:
            for pages in (cache.keys[0], cache.values[0]):
                pages[batch.block_tables[0, 0], :, 5] = torch.inf
        stored = self.stored(cache)
        rows, case = len(batch.positions), self.case
        together = torch.randn(rows, case.heads + 2 * case.kv_heads, case.head_dim).to(self.dtype)
        queries = together[:, : case.heads]
        value_dim = self.spec.attention(0).value_dim
        expected = torch.empty(rows, case.heads * value_dim)
        none = torch.empty(0)
        read = (queries.float(), none, none, batch, cache, expected)
        plain.attend(0, AttentionStep(*read, self.sinks, self.slopes, is_written=True))
        out = torch.full((rows, case.heads * value_dim), torch.nan, dtype=self.dtype)
        shape = kernels.PagedShape(
            case.heads,
            case.kv_heads,
            case.head_dim,
            value_dim,
            PAGE,
            self.spec.attention(0).scale,
            case.cap,
            case.window,
        )
        paged = kernels.PagedRows(
            batch.query_starts,
            batch.context_lengths,
            batch.block_tables,
            batch.visible_ends,
            max(n for n, _ in spans),
        )
        operands = (
            queries,
            *stored,
            self.sinks,
            out,
            self.slopes,
        )
        prefixes = None if shared is None else prefixes_of(shared)
        if padding is not None:
            operands, paged, prefixes = pad(operands, paged, prefixes, spans, *padding)
            kernels.attend_padded(shape, paged, MOST_CHUNKS, prefixes, *operands)
            out = operands[4][:rows]
            assert operands[4][rows:].isnan().all()
        elif prefixes is None:
            kernels.attend_pages(shape, paged, *operands)
        else:
            kernels.attend_shared(shape, paged, prefixes, *operands)
        return out, expected

    def stored(self, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a torch backend's cache as the kernel reads them."""
        keys, values = (
            each[0].transpose(1, 2).to(self.dtype).contiguous()
            for each in (cache.keys, cache.values)
        )
        if not self.is_fp8:
            return keys, values
        key_pages, value_pages = (
            fp8_rows.packed_pages(each.nan_to_num()) for each in (keys, values)
        )
        for part, exact, pages in (
            (cache.keys, keys, key_pages),
            (cache.values, values, value_pages),
        ):
            fp8_pages.bytes_of(pages)[exact.isnan()] = NAN
            part[0].copy_(fp8_pages.decoded_pages(pages).transpose(1, 2))
        return key_pages, value_pages


def pad(
    operands: tuple[Any, ...],
    batch: Any,
    prefixes: SharedPrefixes | None,
    spans: tuple[tuple[int, int], ...],
    rows: int,
    sequences: int,
) -> tuple[tuple[Any, ...], Any, SharedPrefixes | None]:
    """Pad a step's rows with NaN, and its sequences with ones that have no rows."""
    more, last = sequences - len(spans), int(batch.starts[-1])
    decodes = next((i for i, (n, _) in enumerate(spans) if n > 1), len(spans))
    wide = [
        torch.cat((each, torch.full((rows - len(each), *each.shape[1:]), torch.nan)))
        for each in (operands[0], operands[4])
    ]
    batch = dataclasses.replace(
        batch,
        starts=torch.cat((batch.starts, torch.full((more,), last, dtype=torch.int32))),
        lengths=torch.cat((batch.lengths, torch.zeros(more, dtype=torch.int32))),
        tables=torch.cat(
            (batch.tables, torch.full((more, batch.tables.shape[1]), 99_999, dtype=torch.int32))
        ),
        counts=torch.tensor([decodes, len(spans)], dtype=torch.int32),
    )
    if prefixes is not None:
        tokens = torch.cat((prefixes.tokens, torch.zeros(more, dtype=torch.int32)))
        prefixes = dataclasses.replace(prefixes, tokens=tokens)
    return (wide[0], *operands[1:4], wide[1], operands[5]), batch, prefixes


def prefixes_of(pages: Sequence[int]) -> SharedPrefixes:
    """Return the prefixes of sequences that share one with those of the same number of pages.

    pages: number of pages of each sequence's prefix; 0 = it shares none.
    """
    groups = [[i for i, count in enumerate(pages) if count == n] for n in set(pages) - {0}]
    starts = [0, *accumulate(map(len, groups))]
    return SharedPrefixes(
        torch.tensor([PAGE * count for count in pages], dtype=torch.int32),
        torch.tensor([*chain(*groups), *[0] * (len(pages) - starts[-1])], dtype=torch.int32),
        torch.tensor([*starts, starts[-1]], dtype=torch.int32),  # the last prefix has no rows
    )


MOST_CHUNKS = 4


def make_batch(spans: tuple[tuple[int, int], ...], width: int) -> StepBatch:
    """Return a batch whose block tables are random; entries past a context name any block."""
    counts = [-(-context // PAGE) for _, context in spans]
    tables = torch.randint(sum(counts), (len(spans), width), dtype=torch.int32)
    for row, blocks in enumerate(torch.split(torch.randperm(sum(counts)), counts)):
        tables[row, : len(blocks)] = blocks
    lengths = tuple(n for n, _ in spans)
    positions = torch.cat([torch.arange(context - n, context) for n, context in spans])
    return StepBatch(
        token_ids=positions,
        positions=positions,
        slots=positions,
        query_starts=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        context_lengths=torch.tensor([context for _, context in spans], dtype=torch.int32),
        block_tables=tables,
        num_decodes=0,
        query_lengths_host=lengths,
        context_lengths_host=tuple(context for _, context in spans),
    )


def image_ends(spans: tuple[tuple[int, int], ...]) -> Tensor:
    """Let the second to the last but one of each sequence's queries stand for an image."""
    ends = []
    for n, context in spans:
        first = context - n
        ends += [context - 1 if 0 < i < n - 1 else first + i + 1 for i in range(n)]
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("spans", [DECODES, CHUNKS], ids=["decodes", "chunks"])
def test_rows_equal_the_torch_backend(
    base: ModelSpec, case: Case, spans: tuple[tuple[int, int], ...]
) -> None:
    """Chunks with and without a cached prefix in one call."""
    out, expected = Layer(base, case, torch.float32).run(spans)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "spans"),
    [*product(CASES, [DECODES]), *product(CASES[::2], [CHUNKS])],
    ids=str,
)
def test_rows_over_fp8_pages_equal_the_torch_backend(
    base: ModelSpec, case: Case, spans: tuple[tuple[int, int], ...]
) -> None:
    out, expected = Layer(base, case, torch.float32, is_fp8=True).run(spans)
    torch.testing.assert_close(out, expected, atol=FP8_ERROR, rtol=FP8_ERROR)


def test_fp8_pages_that_are_shared_are_read_once(base: ModelSpec) -> None:
    shared = (2, 1, 2, 1, 0, 1, 3)
    layer = Layer(base, Case(8, 2, 64, has_sinks=True, width=16), torch.float32, is_fp8=True)
    out, expected = layer.run(tuple((1, PAGE * n + 30) for n in shared), shared=shared)
    torch.testing.assert_close(out, expected, atol=FP8_ERROR, rtol=FP8_ERROR)


@pytest.mark.parametrize(
    ("case", "shared"),
    [
        *product([CASES[0]], [(0,) * 7, (1,) * 7, (3,) * 7, (0, 2, 2, 0, 2, 0, 0)]),
        *product([case for case in CASES if not case.window], [(2, 1, 2, 1, 0, 1, 3)]),
    ],
    ids=str,
)
def test_shared_pages_are_read_once(base: ModelSpec, case: Case, shared: tuple[int, ...]) -> None:
    """Agents' contexts begin with the instructions of their kind; some have little behind them."""
    contexts = (1, 300, 65, 2, 128, 129, 64)
    spans = tuple((1, PAGE * n + context) for n, context in zip(shared, contexts, strict=True))
    layer = Layer(base, dataclasses.replace(case, width=16), torch.float32)
    out, expected = layer.run(spans, shared=shared)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "spans"),
    [
        *product(CASES[:3], [DECODES, CHUNKS[::2]]),
        *product(CASES, [(*DECODES, *CHUNKS[::2], (2, 2))]),
    ],
    ids=str,
)
def test_padded_rows_equal_the_torch_backend(
    base: ModelSpec, case: Case, spans: tuple[tuple[int, int], ...]
) -> None:
    """A step of streams and prompts whose graph is larger than the step."""
    out, expected = Layer(base, case, torch.float32).run(spans, padding=(48, 11))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


def test_streams_of_a_padded_step_share_their_prefix(base: ModelSpec) -> None:
    shared = (2, 0, 2, 2, 0)
    spans = tuple((1 if i < 4 else 20, 150 + i) for i in range(5))
    layer = Layer(base, Case(8, 2, 64, width=16), torch.float32)
    out, expected = layer.run(spans, shared=shared, padding=(32, 8))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.fixture
def bfloat16_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter multiply bfloat16; it takes the bits of each number for an integer."""

    def as_float(data: npt.NDArray[Any]) -> npt.NDArray[Any]:
        is_bfloat16 = data.dtype == np.uint16
        return (data.astype(np.uint32) << 16).view(np.float32) if is_bfloat16 else data

    def dot(self: object, a: Any, b: Any, d: Any, *precision: object) -> object:
        product = np.matmul(as_float(a.data), as_float(b.data), dtype=np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    interpreter = pytest.importorskip("triton.runtime.interpreter")
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


@pytest.mark.usefixtures("bfloat16_dots")
@pytest.mark.parametrize("spans", [((1, 200), (1, 9)), ((3, 70), (2, 2))], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_equals_float32(
    base: ModelSpec, dtype: torch.dtype, spans: tuple[tuple[int, int], ...]
) -> None:
    case = Case(8, 2, 64, cap=30.0, has_sinks=True)
    out, expected = Layer(base, case, dtype).run(spans)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("spans", [((1, 70),), ((3, 70),)], ids=["decode", "chunk"])
def test_more_heads_than_a_tile_holds_share_a_key_head(
    base: ModelSpec, spans: tuple[tuple[int, int], ...]
) -> None:
    """Falcon-like multi-query attention."""
    out, expected = Layer(base, Case(71, 1, 24, width=2), torch.float32).run(spans)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 12, 90])
def test_tokens_of_an_image_see_each_other(base: ModelSpec, window: int) -> None:
    layer = Layer(base, Case(8, 1, 16, window=window), torch.float32)
    out, expected = layer.run(((5, 5), (40, 100), (1, 70)), images=True)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [2, 16])
def test_overflow_of_a_sequence_reaches_its_rows_alone(base: ModelSpec, width: int) -> None:
    """The sampler finds a NaN by its logits, and fails that request alone."""
    layer = Layer(base, Case(2, 1, 16, width=width), torch.float32)
    out, _ = layer.run(((1, 100), (1, 100)), overflow=True)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


class _Launches:
    """Stands for a kernel: holds the grid and the constants of its launches."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **constants: self.seen.append((grid, constants))


@pytest.mark.parametrize(
    ("padding", "steps", "count"),
    [
        (None, [((1, 1), (1, 2), (1, 3)), ((1, 1000), (1, 64), (1, 1))], 2),
        ((64, 8), [((1, 1), (1, 2), (40, 300)), ((5, 5), (9, 1000))], 4),
    ],
    ids=["decodes", "padded"],
)
def test_launches_depend_on_shapes_alone(
    base: ModelSpec,
    monkeypatch: pytest.MonkeyPatch,
    padding: tuple[int, int] | None,
    steps: list[tuple[tuple[int, int], ...]],
    count: int,
) -> None:
    """A captured graph replays the launches of its first step for all steps of its size."""
    launches = _Launches()
    monkeypatch.setattr(kernels, "attend_tile", launches)
    monkeypatch.setattr(kernels, "merge_parts", launches)
    layer = Layer(base, Case(4, 2, 16, width=16), torch.float32)
    seen = []
    for spans in steps:
        layer.run(spans, padding=padding)
        seen.append(list(launches.seen))
        launches.seen.clear()
    assert len(seen[0]) == count
    assert seen[0] == seen[1]
