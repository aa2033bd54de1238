"""All attention backends agree with the definition in float64."""

import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.kernels.library import InstructionSet, native
from services.engine.kernels.tiles import TILE
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.architecture.distance import alibi_slopes
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import torch_backend
from services.engine.model.attention.interface import AttentionBackend, AttentionStep, KVCache
from services.engine.model.attention.native_backend import NativeAttention, TiledAttention
from services.engine.model.attention.torch_backend import TorchAttention
from services.engine.model.loader import load_spec
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import keep_last
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.specs import one_layer
from tests.unit.engine.tiles import to_rows

BLOCK = 32
CONTEXTS = (1, 31, 32, 33, 100, 512, 513, 1300)
"""Context lengths of the sequences that decode"""
CHUNKS = ((5, 5), (70, 70), (33, 300), (1, 40), (64, 1000))
"""(tokens, context length) of the prompt chunks"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path: Path = tmp_path_factory.mktemp("spec")
    make_checkpoint(path, CONFIGS["llama"])
    return load_spec(path)


def make_spec(
    base: ModelSpec, heads: int, kv_heads: int, head_dim: int, window: int, value_width: int = 0
) -> ModelSpec:
    return one_layer(
        base,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        window=window,
        scale=head_dim**-0.5,
        value_width=value_width,
    )


def make_backend(
    kind: str, spec: ModelSpec, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
) -> AttentionBackend:
    """kv_dtype: of the cache; None = dtype."""
    if kind == "torch":
        return TorchAttention(spec, dtype, torch.device("cpu"))
    if native is None:
        pytest.skip("the kernels were not built")
    if kind == "native":
        return NativeAttention(native, spec, kv_dtype or dtype)
    machine = OLDER[kind] if kind in OLDER else MACHINES[kind]
    if native.limit_instruction_set(machine) != machine:
        pytest.skip(f"this machine lacks {kind}")
    if kind in OLDER:
        return NativeAttention(native, spec, kv_dtype or dtype)
    return TiledAttention(native, spec)


@pytest.fixture(autouse=True)
def unrestricted_kernels() -> Iterator[None]:
    """Lift a test's restriction of the instruction set after it."""
    yield
    if native is not None:
        native.limit_instruction_set(max(InstructionSet))


MACHINES = {"avx512 bf16": InstructionSet.AVX512_BF16, "amx": InstructionSet.AMX}
"""Backend kinds with tiled kernels"""
OLDER = {
    "baseline": InstructionSet.BASELINE,
    "avx2": InstructionSet.AVX2,
    "avx512": InstructionSet.AVX512,
}
"""Backend kinds with the kernels of other machines"""


EXPECTED: dict[bytes, Tensor] = {}
"""Attention of cases by its definition, by a digest of their inputs"""


class Case:
    """Sequences with random keys and values; all but each one's last tokens are cached before."""

    def __init__(self, model: ModelSpec, dtype: torch.dtype, sinks: Tensor | None = None) -> None:
        torch.manual_seed(7)
        self.model = model
        self.sinks = sinks
        self.spec = spec = model.attention(0)
        has_slopes = spec.alibi_bias > 0
        self.slopes = alibi_slopes(spec.num_heads, spec.alibi_bias) if has_slopes else None
        self.spans = [(1, context) for context in CONTEXTS] + list(CHUNKS)
        self.keys = [torch.randn(c, spec.num_kv_heads, spec.head_dim) for _, c in self.spans]
        self.values = [torch.randn(c, spec.num_kv_heads, spec.value_dim) for _, c in self.spans]
        self.queries = [torch.randn(n, spec.num_heads, spec.head_dim) for n, _ in self.spans]
        for parts in (self.keys, self.values, self.queries):
            parts[:] = [part.to(dtype) for part in parts]
        counts = [-(-context // BLOCK) for _, context in self.spans]
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1))
        self.num_blocks = sum(counts)
        self.tiled = False
        """True if outputs are in tiles"""
        self.reader: int | None = None
        """Sequence whose first block another one fills in the tested step"""
        self.images = [range(0)] * len(self.spans)
        """Positions of each sequence's image, whose tokens see each other"""
        self.tables = torch.zeros(len(counts), max(counts), dtype=torch.int32)
        for index, blocks in enumerate(torch.split(order, counts)):
            self.tables[index, : len(blocks)] = blocks

    def share_a_block(self) -> None:
        """Let a decode's first block be one that a later decode fills in the same step."""
        reader, filler = CONTEXTS.index(100), CONTEXTS.index(512)
        self.keys[reader][:BLOCK] = self.keys[filler][-BLOCK:]
        self.values[reader][:BLOCK] = self.values[filler][-BLOCK:]
        self.tables[reader, 0] = self.tables[filler, 512 // BLOCK - 1]
        self.reader = reader

    def put_images(self) -> None:
        """Let some of each chunk's tokens stand for an image."""
        for i, (length, context) in enumerate(self.spans):
            first = context - length
            self.images[i] = range(first + length // 5, first + length - length // 7)

    def run(
        self,
        backend: AttentionBackend,
        *,
        stale: float = 0.0,
        kept: list[int] | None = None,
        tiled: bool = False,
    ) -> Tensor:
        """Fill the cache with `stale`, then with the prefixes, then attend for the other tokens.

        kept: number of each sequence's last queries to attend for; None: all. tiled: whether the
        output is in tiles.
        """
        self.tiled = tiled or isinstance(backend, TiledAttention)
        cache = backend.allocate(self.num_blocks, BLOCK)
        for tensor in cache.pages:
            tensor.fill_(stale)
        prefixes = [
            (i, BLOCK if i == self.reader else 0, c - n)
            for i, (n, c) in enumerate(self.spans)
            if c > n
        ]
        # One query a prefix: its output is read by no one, and its cost grows with their number.
        self._step(backend, cache, prefixes, 0, [1] * len(prefixes))
        steps = [(i, c - n, c) for i, (n, c) in enumerate(self.spans)]
        return self._step(backend, cache, steps, len(CONTEXTS), kept)

    def _step(
        self,
        backend: AttentionBackend,
        cache: KVCache,
        spans: list[tuple[int, int, int]],
        num_decodes: int,
        kept: list[int] | None = None,
    ) -> Tensor:
        lengths = [end - start for _, start, end in spans]
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        tables = self.tables[[index for index, _, _ in spans]].contiguous()
        owners = torch.repeat_interleave(torch.arange(len(spans)), torch.tensor(lengths))
        slots = tables[owners, positions // BLOCK].long() * BLOCK + positions % BLOCK
        ends = [
            self.images[i].stop if position in self.images[i] else position + 1
            for i, start, end in spans
            for position in range(start, end)
        ]
        batch = StepBatch(
            token_ids=positions,
            positions=positions,
            slots=slots,
            query_starts=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            context_lengths=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            block_tables=tables,
            num_decodes=num_decodes,
            query_lengths_host=tuple(lengths),
            context_lengths_host=tuple(end for _, _, end in spans),
            visible_ends=torch.tensor(ends, dtype=torch.int32) if any(self.images) else None,
        )
        keys = torch.cat([self.keys[i][start:end] for i, start, end in spans])
        values = torch.cat([self.values[i][start:end] for i, start, end in spans])
        queries = torch.cat(
            [
                self.queries[i]
                if length == len(self.queries[i]) and num_decodes
                else torch.zeros(length, *self.queries[i].shape[1:], dtype=keys.dtype)
                for (i, _, _), length in zip(spans, lengths, strict=True)
            ]
        )
        parts = (queries, keys, values)
        together = torch.cat([part.flatten(1) for part in parts], dim=1)
        views = together.split_with_sizes([part[0].numel() for part in parts], dim=1)
        queries, keys, values = (
            view.view(part.shape) for view, part in zip(views, parts, strict=True)
        )
        if kept is not None:
            some = keep_last(lengths, kept)
            batch = dataclasses.replace(batch, output_rows=some).narrowed
            queries[: len(some.indices)] = queries[some.indices]
            queries = queries[: len(some.indices)]
        rows = len(queries)
        width = self.spec.num_heads * self.spec.value_dim
        out = torch.empty(-(-rows // TILE) * TILE, width, dtype=keys.dtype)
        operands = (queries, keys, values, batch, cache, out[:rows], self.sinks, self.slopes)
        backend.attend(0, AttentionStep(*operands))
        return (to_rows(out) if self.tiled else out)[:rows].float()

    def expected(self, rounded: Callable[[Tensor], Tensor] = lambda heads: heads) -> Tensor:
        """Return attention by its definition, in float64. Equal cases compute it once.

        rounded: returns the keys or values that a cache holds.
        """
        keys, values = ([rounded(each) for each in p] for p in (self.keys, self.values))
        digest = hashlib.sha256(repr((self.spec, self.images)).encode())
        sinks = [] if self.sinks is None else [self.sinks]
        for tensor in (*self.queries, *keys, *values, *sinks):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
        known = digest.digest()
        if known not in EXPECTED:
            EXPECTED[known] = self._define(keys, values)
        return EXPECTED[known]

    def _define(self, keys_held: list[Tensor], values_held: list[Tensor]) -> Tensor:
        spec, window, sinks = self.spec, self.spec.window, self.sinks
        rows = []
        for (length, context), image, q, k, v in zip(
            self.spans, self.images, self.queries, keys_held, values_held, strict=True
        ):
            group = spec.num_heads // spec.num_kv_heads
            keys = k.double().repeat_interleave(group, dim=1)
            values = v.double().repeat_interleave(group, dim=1)
            scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * spec.scale
            at = torch.arange(context - length, context)[:, None]
            ends = [image.stop if p in image else p + 1 for p in range(context - length, context)]
            seen = torch.arange(context) < torch.tensor(ends)[:, None]
            if window:
                seen &= torch.arange(context) > at - window
            if cap := spec.cap:
                scores = cap * torch.tanh(scores / cap)
            if self.slopes is not None:
                scores += self.slopes.double()[:, None, None] * (torch.arange(context) - at)
            scores = scores.masked_fill(~seen, -torch.inf)
            if sinks is None:
                weights = scores.softmax(-1)
            else:
                sums = scores.exp().sum(-1) + sinks.double().exp()[:, None]
                weights = scores.exp() / sums[:, :, None]
            rows.append(torch.einsum("hqk,khd->qhd", weights, values).flatten(1))
        return torch.cat(rows).float()


SHAPES = [
    (4, 4, 32, 0),
    (8, 2, 64, 0),
    (8, 2, 64, 45),
    (7, 1, 128, 0),
    (40, 1, 32, 130),
    (6, 2, 96, 0),
    (2, 1, 256, 7),
    (2, 1, 512, 0),
    (6, 2, 64, 0, 32),
    (16, 1, 192, 45, 128),
    (2, 2, 32, 0, 96),
]
"""Query heads, key heads, head dimension, window; width of values, if it is another"""

every_kind = pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("torch", torch.float32, 1e-5),
        ("native", torch.float32, 1e-5),
        ("native", torch.bfloat16, 2e-2),
        ("baseline", torch.float32, 1e-5),
        ("avx2", torch.float32, 1e-5),
        ("avx512 bf16", torch.bfloat16, 2e-2),
        ("amx", torch.bfloat16, 2e-2),
    ],
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_kind
def test_decodes_and_chunks_equal_the_definition(
    base: ModelSpec,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    shape: tuple[int, ...],
) -> None:
    case = Case(make_spec(base, *shape), dtype)
    attended = case.run(make_backend(kind, case.model, dtype))
    torch.testing.assert_close(attended, case.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("narrowed", [False, True])
@every_kind
def test_tokens_of_an_image_see_each_other(
    base: ModelSpec,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    shape: tuple[int, ...],
    narrowed: bool,
) -> None:
    """Gemma 3's images; text before and behind them sees what it always sees."""
    case = Case(make_spec(base, *shape), dtype)
    case.put_images()
    lengths = [length for length, _ in case.spans]
    kept = [1 + length // 2 if narrowed else length for length in lengths]
    backend = make_backend(kind, case.model, dtype)
    attended = case.run(backend, stale=torch.nan, kept=kept if narrowed else None)
    expected = case.expected()[keep_last(lengths, kept).indices]
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@every_kind
def test_fewer_queries_than_keys_attend_to_all_keys(
    base: ModelSpec,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    shape: tuple[int, ...],
) -> None:
    """Keys of tokens without a query are still written and attended to."""
    case = Case(make_spec(base, *shape), dtype)
    lengths = [length for length, _ in case.spans]
    kept = [1] * len(CONTEXTS) + [1, 1, *(1 + length // 2 for length, _ in CHUNKS[2:])]
    attended = case.run(make_backend(kind, case.model, dtype), stale=torch.nan, kept=kept)
    expected = case.expected()[keep_last(lengths, kept).indices]
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("torch", torch.float32, 1e-5),
        ("native", torch.float32, 1e-5),
        ("avx512 bf16", torch.bfloat16, 2e-2),
        ("amx", torch.bfloat16, 2e-2),
    ],
)
def test_block_is_readable_in_the_step_that_fills_it(
    base: ModelSpec, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    """The scheduler shares a block as soon as its last token is scheduled."""
    case = Case(make_spec(base, 8, 2, 64, 0), dtype)
    case.share_a_block()
    backend = make_backend(kind, case.model, dtype)
    attended = case.run(backend, stale=3.0)
    torch.testing.assert_close(attended, case.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 4, 8)], ids=["plain", "sinks"])
@pytest.mark.parametrize("cap", [0.0, 1.5])
@pytest.mark.parametrize("window", [0, 45])
@every_kind
def test_soft_caps_and_sinks_equal_the_definition(
    base: ModelSpec,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    window: int,
    cap: float,
    sinks: Tensor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma 2's and gpt-oss's softmax; the torch backend computes scores in several pieces."""
    monkeypatch.setattr(torch_backend, "_PIECE", 32)
    spec = make_spec(base, 8, 2, 64, window)
    case = Case(one_layer(spec, cap=cap, has_sinks=sinks is not None), dtype, sinks)
    backend = make_backend(kind, case.model, dtype)
    expected = case.expected()
    torch.testing.assert_close(case.run(backend), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(case.run(backend, stale=torch.nan), case.run(backend))


@pytest.mark.parametrize(
    ("shape", "bias"),
    [
        *(((12, 12, 32, 0), 8.0), ((7, 1, 128, 0), 16.0), ((40, 1, 32, 130), 8.0)),
        *(((6, 2, 96, 45), 8.0), ((2, 1, 512, 0), 16.0)),
    ],
    ids=str,
)
@every_kind
def test_biases_by_distance_equal_the_definition(
    base: ModelSpec,
    kind: str,
    dtype: torch.dtype,
    tolerance: float,
    shape: tuple[int, int, int, int],
    bias: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The slopes of BLOOM and MPT: the steepest hide far keys, the flattest hardly any."""
    monkeypatch.setattr(torch_backend, "_PIECE", 32)
    case = Case(one_layer(make_spec(base, *shape), alibi_bias=bias), dtype)
    backend = make_backend(kind, case.model, dtype)
    expected = case.expected()
    torch.testing.assert_close(case.run(backend), expected, atol=tolerance, rtol=tolerance)
    assert torch.equal(case.run(backend, stale=torch.nan), case.run(backend))


@pytest.mark.parametrize("block", [24, 40])
@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("kind", OLDER)
def test_distances_are_those_of_tokens_in_blocks_with_places_to_spare(
    base: ModelSpec, kind: str, kv_dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of 24 tokens has room for 32, which must not count as further apart."""
    monkeypatch.setattr(sys.modules[__name__], "BLOCK", block)
    case = Case(one_layer(make_spec(base, 6, 2, 24, 45), alibi_bias=8.0), torch.float32)
    attended = case.run(make_backend(kind, case.model, torch.float32, kv_dtype))
    expected = case.expected(CACHES[kv_dtype])
    tolerance = 3e-3 if kv_dtype == torch.int8 else 1e-5
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("native", torch.float32), *((kind, torch.bfloat16) for kind in MACHINES)],
    ids=str,
)
@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_extreme_sinks_take_none_or_all_of_the_weight(
    base: ModelSpec, kind: str, dtype: torch.dtype, sink: float
) -> None:
    spec = make_spec(base, 8, 2, 64, 0)
    without = Case(spec, dtype).expected()
    expected = without if sink < 0 else torch.zeros_like(without)
    case = Case(one_layer(spec, has_sinks=True), dtype, torch.full((8,), sink))
    attended = case.run(make_backend(kind, case.model, dtype))
    torch.testing.assert_close(attended, expected, atol=2e-2, rtol=2e-2)


def in_int8(heads: Tensor) -> Tensor:
    """Round each token of each head to int8, with the scale of its largest number."""
    scales = heads.float().abs().amax(dim=-1, keepdim=True) / 127
    return torch.where(scales > 1e-30, (heads.float() / scales).round() * scales, 0)


CACHES: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float32: lambda heads: heads,
    torch.bfloat16: lambda heads: heads.bfloat16().float(),
    torch.float16: lambda heads: heads.half().float(),
    torch.int8: in_int8,
}
"""Roundings of a cache of each type"""


@pytest.mark.parametrize("kv_dtype", CACHES, ids=str)
@pytest.mark.parametrize("kind", OLDER)
@pytest.mark.parametrize(
    "shape",
    [
        *((8, 2, 64, 45), (7, 1, 128, 0), (40, 1, 32, 130)),
        *((6, 2, 24, 0), (5, 1, 80, 33), (60, 2, 8, 0)),
    ],
    ids=str,
)
def test_cache_of_another_type_changes_no_more_than_rounding(
    base: ModelSpec, kind: str, kv_dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Sums stay float32: an error beyond the cache's rounding would add up over the layers."""
    case = Case(make_spec(base, *shape), torch.float32)
    attended = case.run(make_backend(kind, case.model, torch.float32, kv_dtype))
    expected = case.expected(CACHES[kv_dtype])
    # a number half-way between two of int8 may round to either
    tolerance = 3e-3 if kv_dtype == torch.int8 else 1e-5
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-2, 4, 6)], ids=["plain", "sinks"])
@pytest.mark.parametrize("kv_dtype", CACHES, ids=str)
@pytest.mark.parametrize("kind", OLDER)
def test_caps_and_sinks_are_exact_over_any_cache(
    base: ModelSpec, kind: str, kv_dtype: torch.dtype, sinks: Tensor | None
) -> None:
    spec = one_layer(make_spec(base, 6, 2, 24, 45), cap=1.5, has_sinks=sinks is not None)
    case = Case(spec, torch.float32, sinks)
    attended = case.run(make_backend(kind, case.model, torch.float32, kv_dtype))
    expected = case.expected(CACHES[kv_dtype])
    tolerance = 3e-3 if kv_dtype == torch.int8 else 1e-5
    torch.testing.assert_close(attended, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
def test_output_over_another_cache_is_in_the_tiles_that_products_read(
    base: ModelSpec, kv_dtype: torch.dtype
) -> None:
    """--kv-dtype int8 on a CPU with AMX, whose products read tiles."""
    if native is None:
        pytest.skip("the kernels were not built")
    case = Case(make_spec(base, 8, 2, 64, 0), torch.bfloat16)
    backend = NativeAttention(native, case.model, kv_dtype, tiled=True)
    expected = case.expected(CACHES[kv_dtype])
    torch.testing.assert_close(case.run(backend, tiled=True), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", OLDER)
def test_numbers_beyond_float16_become_its_largest(base: ModelSpec, kind: str) -> None:
    """One key of a huge model must not turn a whole answer into NaN."""
    case = Case(make_spec(base, 8, 2, 64, 0), torch.float32)
    case.values[-1][500] = 1e6
    attended = case.run(make_backend(kind, case.model, torch.float32, torch.float16))
    expected = case.expected(lambda heads: heads.clamp(-65504, 65504).half().float())
    torch.testing.assert_close(attended, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "dtype", "kv_dtype"),
    [
        ("torch", torch.float32, torch.float32),
        *((kind, torch.float32, kv_dtype) for kind in OLDER for kv_dtype in CACHES),
        *((kind, torch.bfloat16, torch.bfloat16) for kind in MACHINES),
    ],
    ids=str,
)
def test_stale_cache_content_has_no_effect(
    base: ModelSpec, kind: str, dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    """A request whose values overflowed must not affect requests that reuse its blocks."""
    case = Case(make_spec(base, 8, 2, 64, 0), dtype)
    backend = make_backend(kind, case.model, dtype, kv_dtype)
    # the bytes of a scale that is NaN
    stale = -1 if kv_dtype == torch.int8 else torch.nan
    assert torch.equal(case.run(backend, stale=stale), case.run(backend))


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("native", torch.float32, 1e-4),
        ("native", torch.bfloat16, 5e-2),
        ("avx512 bf16", torch.bfloat16, 5e-2),
        ("amx", torch.bfloat16, 5e-2),
    ],
)
def test_scores_that_grow_along_the_context_stay_exact(
    base: ModelSpec, kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Some models' scores reach hundreds: weights relative to an early score would overflow."""
    case = Case(make_spec(base, 8, 2, 64, 0), dtype)
    for keys in case.keys:
        keys *= torch.linspace(1, 60, len(keys), dtype=dtype)[:, None, None]
    attended = case.run(make_backend(kind, case.model, dtype))
    torch.testing.assert_close(attended, case.expected(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(
    ("kind", "dtype", "kv_dtype"),
    [
        *((kind, torch.float32, kv_dtype) for kind in OLDER for kv_dtype in CACHES),
        *((kind, torch.bfloat16, torch.bfloat16) for kind in MACHINES),
    ],
    ids=str,
)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_overflow_of_a_sequence_leaves_the_others_unchanged(
    base: ModelSpec, kind: str, dtype: torch.dtype, kv_dtype: torch.dtype, value: float
) -> None:
    """Attention over infinite keys must also terminate."""
    case = Case(make_spec(base, 8, 2, 64, 0), dtype)
    backend = make_backend(kind, case.model, dtype, kv_dtype)
    before = case.run(backend)
    case.keys[-1][500:] = case.values[-1][500:] = value
    rows = len(case.queries[-1])
    assert torch.equal(case.run(backend)[:-rows], before[:-rows])


@pytest.mark.parametrize("kind", OLDER)
def test_int8_cache_holds_zeros_and_tiny_numbers(base: ModelSpec, kind: str) -> None:
    """A row of zeros has the scale zero, by which no number can be divided."""
    case = Case(make_spec(base, 8, 2, 64, 0), torch.float32)
    for keys, values in zip(case.keys, case.values, strict=True):
        keys[::3], values[::3] = 0, 0
        keys[1::3], values[1::3] = 1e-42, 1e-42
    attended = case.run(make_backend(kind, case.model, torch.float32, torch.int8))
    expected = case.expected(in_int8)
    torch.testing.assert_close(attended, expected, atol=3e-3, rtol=3e-3)


@pytest.mark.parametrize("kind", MACHINES)
def test_block_size_that_is_not_whole_tiles_is_refused(base: ModelSpec, kind: str) -> None:
    with pytest.raises(ValueError, match="multiple of 32"):
        make_backend(kind, make_spec(base, 8, 2, 64, 0), torch.bfloat16).allocate(4, 16)


def test_cache_takes_the_memory_it_states(base: ModelSpec) -> None:
    """The engine sizes KV memory by this figure: too small a value exhausts the memory."""
    spec = base
    cache = TorchAttention(spec, torch.float32, torch.device("cpu")).allocate(5, BLOCK)
    held = sum(tensor.nbytes for tensor in cache.pages)
    assert held == 5 * BLOCK * 4 * sum(group.token_width for group in layer_groups(spec))


@pytest.mark.parametrize("kv_dtype", CACHES, ids=str)
@pytest.mark.parametrize("head_dim", [24, 64])
def test_narrow_cache_takes_the_memory_it_states(
    base: ModelSpec, kv_dtype: torch.dtype, head_dim: int
) -> None:
    if native is None:
        pytest.skip("the kernels were not built")
    spec = make_spec(base, 4, 2, head_dim, 0)
    backend = NativeAttention(native, spec, kv_dtype)
    held = sum(tensor.nbytes for tensor in backend.allocate(5, BLOCK).pages)
    assert held == 5 * BLOCK * backend.token_bytes(spec.attention(0))


@pytest.mark.parametrize("kv_dtype", CACHES, ids=str)
@pytest.mark.parametrize("kind", OLDER)
@pytest.mark.parametrize("part", ["keys", "values"])
def test_nan_in_a_cache_reaches_the_answer(
    base: ModelSpec, kind: str, kv_dtype: torch.dtype, part: str
) -> None:
    """The engine ends a sequence of NaN with an error; a plausible answer would hide the fault."""
    case = Case(make_spec(base, 8, 2, 64, 0), torch.float32)
    getattr(case, part)[-1][500, :, 3] = torch.nan
    attended = case.run(make_backend(kind, case.model, torch.float32, kv_dtype))
    heads = attended[-len(case.queries[-1]) :].view(-1, 8, 64)
    assert heads.isnan().any(-1).all()
