"""The CUDA backends without a GPU: Triton's interpreter runs its kernels.

Flash attention has no CPU path: a definition in torch replaces it.
"""

import dataclasses
import itertools
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from services.common.settings import StartupError
from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import choose_backend
from services.engine.model.attention.interface import AttentionBackend, AttentionStep, KVCache
from services.engine.model.attention.torch_backend import TorchAttention
from services.engine.model.loader import load_spec
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import keep_last
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.specs import one_layer

triton = pytest.importorskip("triton")
paged = pytest.importorskip("services.engine.model.attention.paged_backend")
prompts = pytest.importorskip("services.engine.model.attention.long_prompts")
xformers = pytest.importorskip("services.engine.model.attention.xformers_backend")

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
DTYPE = torch.float16
PAGE = 64
HEAD_DIM = 16
HEADS = [(4, 2), (3, 3), (8, 1)]
"""Query heads, key heads"""


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    return one_layer(load_spec(tmp_path), head_dim=HEAD_DIM, scale=0.25)


def with_heads(spec: ModelSpec, heads: int, kv_heads: int, window: int = 0) -> ModelSpec:
    return one_layer(spec, num_heads=heads, num_kv_heads=kv_heads, window=window)


class Case:
    """A step over random keys and values, in the caches of two backends."""

    kind: type[TorchAttention] = paged.PagedAttention
    """The tested one"""

    def __init__(self, spec: ModelSpec, num_decodes: int, spans: Sequence[tuple[int, int]]) -> None:
        """spans: queries and context of each sequence; the first `num_decodes` have one query."""
        torch.manual_seed(0)
        self.spec = spec
        pages = [-(-context // PAGE) for _, context in spans]
        tables = torch.zeros(len(spans), 16, dtype=torch.int32)
        for row, blocks in enumerate(torch.split(torch.randperm(sum(pages)), pages)):
            tables[row, : len(blocks)] = blocks
        lengths = tuple(n for n, _ in spans)
        positions = torch.cat([torch.arange(context - n, context) for n, context in spans])
        owners = torch.arange(len(spans)).repeat_interleave(torch.tensor(lengths))
        self.batch = StepBatch(
            token_ids=positions,
            positions=positions,
            slots=tables[owners, positions // PAGE].long() * PAGE + positions % PAGE,
            query_starts=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
            context_lengths=torch.tensor([context for _, context in spans], dtype=torch.int32),
            block_tables=tables,
            num_decodes=num_decodes,
            query_lengths_host=lengths,
            context_lengths_host=tuple(context for _, context in spans),
        )
        self.backends: tuple[AttentionBackend, ...] = (
            self.kind(spec, DTYPE, CPU),
            TorchAttention(spec, DTYPE, CPU),
        )
        self.caches = [each.allocate(sum(pages), PAGE) for each in self.backends]
        for kind in ("keys", "values"):
            one, other = (getattr(cache, kind)[0] for cache in self.caches)
            other.copy_(one.copy_(torch.randn(one.shape)))
        heads, kv_heads = spec.attention(0).num_heads, spec.attention(0).num_kv_heads
        together = torch.randn(len(positions), heads + 2 * kv_heads, HEAD_DIM, dtype=DTYPE)
        self.heads = together.tensor_split((heads, heads + kv_heads), dim=1)

    def narrow(self, kept: list[int]) -> None:
        """Keep the last `kept` queries of each sequence."""
        rows = keep_last(list(self.batch.query_lengths_host), kept)
        self.batch = dataclasses.replace(self.batch, output_rows=rows).narrowed
        queries, keys, values = self.heads
        self.heads = queries[rows.indices], keys, values

    def attend(self, which: int, *, is_written: bool = False) -> Tensor:
        """Return the output of the tested backend (0) or the torch backend (1)."""
        queries, keys, values = self.heads
        out = torch.full((len(queries), queries[0].numel()), torch.nan, dtype=DTYPE)
        cache: KVCache = self.caches[which]
        step = AttentionStep(queries, keys, values, self.batch, cache, out, is_written=is_written)
        self.backends[which].attend(0, step)
        return out

    def check(self) -> None:
        torch.testing.assert_close(self.attend(0), self.attend(1), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("kind", [paged.PagedAttention, xformers.XformersAttention])
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decode_equals_the_torch_backend(
    spec: ModelSpec,
    heads: int,
    kv_heads: int,
    window: int,
    kind: type[TorchAttention],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Five sequences, which xformers' backend pads to eight rows."""
    monkeypatch.setattr(Case, "kind", kind)
    spans = [(1, context) for context in (1, 63, 64, 65, 700)]
    Case(with_heads(spec, heads, kv_heads, window), 5, spans).check()


@pytest.mark.parametrize("window", [0, 20])
def test_mixed_step_equals_the_torch_backend(spec: ModelSpec, window: int) -> None:
    """Sequences that decode, and chunks with and without a cached prefix."""
    spans = [(1, 65), (1, 3), (5, 5), (20, 130), (1, 64)]
    Case(with_heads(spec, 4, 2, window), 2, spans).check()


@pytest.mark.parametrize("kept", [(1, 1, 1, 1, 1), (1, 1, 2, 9, 1)], ids=["ends", "rows"])
def test_last_layer_attends_for_some_rows(spec: ModelSpec, kept: tuple[int, ...]) -> None:
    """Keys of all tokens are written; only rows with an output attend, even of whole prompts."""
    case = Case(with_heads(spec, 4, 2), 2, [(1, 65), (1, 3), (5, 5), (20, 130), (1, 1)])
    case.narrow(list(kept))
    case.check()


def test_keys_that_are_written_already_stay(spec: ModelSpec) -> None:
    """The kernel that rotates the keys also writes them, and rounds them once."""
    case = Case(with_heads(spec, 4, 2), 1, [(1, 65), (5, 70)])
    before = [case.attend(which) for which in range(2)]
    for heads in case.heads[1:]:
        heads.fill_(torch.nan)
    after = [case.attend(which, is_written=True) for which in range(2)]
    assert torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])


def flash_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    starts: Tensor,
    longest: int,
    scale: float,
    window: int,
) -> Tensor:
    """Compute in torch what torch's flash attention computes on a GPU."""
    out = torch.empty_like(queries)
    group = queries.shape[1] // keys.shape[1]
    ends = starts.tolist()
    assert longest == max(end - start for start, end in itertools.pairwise(ends))
    for start, end in itertools.pairwise(ends):
        some, seen, content = (
            x[start:end].float().transpose(0, 1) for x in (queries, keys, values)
        )
        scores = some @ seen.repeat_interleave(group, 0).transpose(1, 2) * scale
        mask = torch.ones(scores.shape[1:], dtype=torch.bool).tril()
        if window:
            mask = mask.triu(1 - window)
        weights = scores.masked_fill(~mask, -torch.inf).softmax(2)
        attended = weights @ content.repeat_interleave(group, 0)
        out[start:end] = attended.transpose(0, 1).to(out.dtype)
    return out


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("num_decodes", [0, 1])
def test_whole_prompts_equal_the_torch_backend(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, num_decodes: int, window: int
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(paged, "flash_attention", flash_attention)
    spans = [(1, 70)] * num_decodes + [(5, 5), (70, 70), (1, 1)]
    Case(with_heads(spec, 4, 2, window), num_decodes, spans).check()


@pytest.mark.parametrize("kept", [None, (1, 20, 5, 20, 9)], ids=["all rows", "some rows"])
def test_long_chunks_equal_the_torch_backend(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, kept: tuple[int, ...] | None
) -> None:
    """Between short ones, with prefixes and without, by the way that a GPU has measured."""
    monkeypatch.setattr(prompts, "_LEAST_ROWS", 20)
    monkeypatch.setattr(prompts, "_LEAST_PAIRS", 20 * 60)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(paged, "flash_attention", flash_attention)
    case = Case(with_heads(spec, 4, 2), 1, [(1, 65), (40, 130), (5, 5), (20, 130), (70, 70)])
    backend, layer = case.backends[0], case.spec.attention(0)
    assert isinstance(backend, paged.PagedAttention)
    taken: list[int] = []

    attend = prompts.InParts.attend

    def noted(way: Any, chunk: Any) -> None:
        taken.append(len(chunk.queries))
        attend(way, chunk)

    monkeypatch.setattr(prompts.InParts, "attend", noted)
    way = prompts.InParts(layer.scale, 64)
    ways = backend._long_prompts._behind, backend._long_prompts._whole
    for each in ways:
        each[layer] = way
    if kept is not None:
        case.narrow(list(kept))
    case.check()
    assert taken == ([40, 20, 70] if kept is None else [20, 20])


def test_triton_without_block_pointers_is_refused(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra `gpu` allows a newer Triton than xformers' kernel; the engine says so at start."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delattr(triton.language, "make_block_ptr")
    monkeypatch.delitem(sys.modules, xformers.__name__)
    with pytest.raises(StartupError, match=r"^--attention xformers: .*Triton [\d.]+ lacks; `.*`"):
        choose_backend(spec, torch.bfloat16, torch.device("cuda"), with_xformers=True)
    assert choose_backend(spec, torch.bfloat16, torch.device("cuda")).name == "triton"


def test_import_warns_of_no_extensions() -> None:
    """xformers' extensions are built for another CUDA. The backend calls none of them."""
    command = [sys.executable, "-c", f"import {xformers.__name__}"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert "XFORMERS" not in done.stderr
