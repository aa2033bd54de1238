"""Attention over pages in Triton's interpreter equals the torch backend."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.interface import AttentionStep
from services.engine.model.attention.torch_backend import TorchAttention
from services.engine.model.checkpoint.families import FAMILIES
from services.engine.model.loader import load_spec
from tests.unit.engine.checkpoints import CONFIGS, make_checkpoint

kernels = pytest.importorskip("services.engine.model.attention.paged_kernels")

CPU = torch.device("cpu")
PAGE = 64
DECODES = ((1, 1), (1, 63), (1, 64), (1, 65), (1, 300))
CHUNKS = ((5, 5), (3, 70), (1, 130), (70, 200))
"""(queries, context) of sequences"""


@dataclasses.dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    cap: float = 0.0
    has_sinks: bool = False
    width: int = 16
    """Columns of the block tables; with many, contexts are divided"""


CASES = (
    Case(4, 2, 16),
    Case(4, 2, 16, width=5),
    Case(3, 3, 32, window=20),
    Case(8, 1, 64, window=100, has_sinks=True),
    Case(2, 1, 256, cap=2.0),
    Case(2, 1, 96, window=300, cap=2.0, has_sinks=True),
    Case(7, 1, 80, has_sinks=True),
    Case(70, 1, 24),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    path: Path = tmp_path_factory.mktemp("spec")
    make_checkpoint(path, CONFIGS["llama"])
    return load_spec(path)


class Layer:
    """One layer over random keys and values. Slots that no context covers hold NaN."""

    def __init__(self, base: ModelSpec, case: Case, dtype: torch.dtype) -> None:
        torch.manual_seed(3)
        self.case, self.dtype = case, dtype
        self.spec = dataclasses.replace(
            base,
            num_layers=1,
            num_heads=case.heads,
            num_kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            windows=(case.window,),
            attention_scale=case.head_dim**-0.5,
            attention_cap=case.cap,
            family=FAMILIES["GptOssForCausalLM"] if case.has_sinks else base.family,
        )
        self.sinks = torch.linspace(-2, 3, case.heads) if case.has_sinks else None

    def run(self, spans: tuple[tuple[int, int], ...], images: bool = False) -> tuple[Tensor, Tensor]:
        """Return the kernel's output, and the torch backend's in float32."""
        batch = make_batch(spans, self.case.width)
        if images:
            ends = [c for n, c in spans for _ in range(n // 2)]  # noqa: F841
            batch = dataclasses.replace(batch, visible_ends=image_ends(spans))
        plain = TorchAttention(
            self.spec, torch.float32, CPU, None if self.sinks is None else (self.sinks,)
        )
        cache = plain.allocate(int(batch.block_tables.max()) + 1, PAGE)
        for pages in (cache.keys[0], cache.values[0]):
            pages.fill_(torch.nan)
            for row, (_, context) in enumerate(spans):
                for column, page in enumerate(batch.block_tables[row].tolist()):
                    held = pages[page, :, : max(0, min(PAGE, context - column * PAGE))]
                    held.copy_(torch.randn(held.shape).to(self.dtype))
        rows = len(batch.positions)
        case = self.case
        together = torch.randn(rows, case.heads + 2 * case.kv_heads, case.head_dim).to(self.dtype)
        queries = together[:, : case.heads]
        expected = torch.empty(rows, case.heads * case.head_dim)
        none = torch.empty(0)
        plain.attend(
            0, AttentionStep(queries.float(), none, none, batch, cache, expected, is_written=True)
        )
        out = torch.full((rows, case.heads * case.head_dim), torch.nan, dtype=self.dtype)
        kernels.attend_pages(
            kernels.PagedShape(
                case.heads,
                case.kv_heads,
                case.head_dim,
                PAGE,
                self.spec.attention_scale,
                case.cap,
                case.window,
            ),
            kernels.PagedRows(
                batch.query_starts,
                batch.context_lengths,
                batch.block_tables,
                batch.visible_ends,
                max(n for n, _ in spans),
            ),
            queries,
            cache.keys[0].transpose(1, 2).to(self.dtype).contiguous(),
            cache.values[0].transpose(1, 2).to(self.dtype).contiguous(),
            self.sinks,
            out,
        )
        return out, expected


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
        ends += [
            context - 1 if 0 < i < n - 1 else first + i + 1 for i in range(n)
        ]
    return torch.tensor(ends, dtype=torch.int32)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_decodes_equal_the_torch_backend(base: ModelSpec, case: Case) -> None:
    out, expected = Layer(base, case, torch.float32).run(DECODES)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_equal_the_torch_backend(base: ModelSpec, case: Case) -> None:
    """Chunks with and without a cached prefix in one call."""
    out, expected = Layer(base, case, torch.float32).run(CHUNKS)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
