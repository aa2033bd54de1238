"""Decodes of latent attention equal its definition, whatever their contexts and pages."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.kernels.library import InstructionSet, Native
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.mixers.native_latent_attention import NativeLatentDecodes
from tests.unit.engine.machines import restrict_kernels

KERNELS = (InstructionSet.BASELINE, InstructionSet.AVX2, InstructionSet.AVX512)
"""Instruction sets with kernels of their own"""
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
_PLAIN = LatentSpec(
    num_heads=4,
    query_width=0,
    latent_width=64,
    key_width=16,
    shared_width=8,
    value_width=16,
    scale=0.2,
    rotary=None,
    is_interleaved=False,
    has_bias=False,
    norm_epsilon=1e-6,
)
SHAPES = {
    "plain": _PLAIN,
    "DeepSeek V2": replace(
        _PLAIN, num_heads=16, latent_width=512, key_width=128, shared_width=64, value_width=128
    ),
    "odd sizes": replace(
        _PLAIN, num_heads=5, latent_width=37, key_width=11, shared_width=6, value_width=9
    ),
    "one head": replace(_PLAIN, num_heads=1),
}


@dataclass(frozen=True, slots=True)
class Operands:
    keys: Tensor
    values: Tensor
    queries: Tensor
    latents: Tensor
    """Latents of the step's tokens"""
    pages: Tensor
    batch: StepBatch


@pytest.fixture(params=KERNELS, ids=lambda each: each.name)
def kernels(request: pytest.FixtureRequest) -> Iterator[Native]:
    """The kernels on each instruction set that has some of its own."""
    with restrict_kernels(request.param) as native:
        yield native


def make_operands(
    spec: LatentSpec,
    contexts: Sequence[int],
    dtype: torch.dtype = torch.float32,
    block_size: int = 32,
    extra: int = 0,
) -> Operands:
    """Make decodes of these contexts, whose blocks are scattered and padded with NaNs.

    extra: numbers of a page behind the latent.
    """
    torch.manual_seed(len(contexts))
    counts = [-(-context // block_size) for context in contexts]
    order = torch.randperm(sum(counts) + 3)
    tables = torch.zeros(len(contexts), max(counts) + 2, dtype=torch.int32)
    pages = torch.full((len(order), block_size, spec.absorbed_width + extra), torch.nan)
    slots, first = [], 0
    for row, (context, count) in enumerate(zip(contexts, counts, strict=True)):
        tables[row, :count] = order[first : first + count]
        first += count
        places = torch.arange(context - 1)
        blocks = tables[row, places // block_size].long()
        old = torch.randn(context - 1, spec.absorbed_width)
        pages[blocks, places % block_size, : spec.absorbed_width] = old
        last = context - 1
        slots.append(int(tables[row, last // block_size]) * block_size + last % block_size)
    batch = StepBatch(
        token_ids=torch.zeros(len(contexts), dtype=torch.int64),
        positions=torch.tensor(contexts) - 1,
        slots=torch.tensor(slots),
        query_starts=torch.arange(len(contexts) + 1, dtype=torch.int32),
        context_lengths=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables[:, : max(counts)],
        num_decodes=len(contexts),
        query_lengths_host=(1,) * len(contexts),
        context_lengths_host=tuple(contexts),
    )
    return Operands(
        keys=(torch.randn(spec.num_heads, spec.key_width, spec.latent_width) / 4).to(dtype),
        values=(torch.randn(spec.num_heads, spec.value_width, spec.latent_width) / 8).to(dtype),
        queries=torch.randn(len(contexts), spec.num_heads * spec.head_width).to(dtype),
        latents=torch.randn(len(contexts), spec.absorbed_width).to(dtype),
        pages=pages.to(dtype),
        batch=batch,
    )


def attend(native: Native, spec: LatentSpec, operands: Operands) -> Tensor:
    """Write the step's latents, and return the outputs of all sequences."""
    width = spec.num_heads * spec.value_width
    out = torch.full((len(operands.queries), width), torch.nan, dtype=operands.keys.dtype)
    decodes = NativeLatentDecodes(native, spec, operands.keys, operands.values, 0)
    decodes.attend(operands.queries, operands.latents, operands.pages, operands.batch, out)
    return out


def defined(spec: LatentSpec, operands: Operands) -> Tensor:
    """Compute keys and values of each head, and attention to them, in float64."""
    keys, values = operands.keys.double(), operands.values.double()
    widths = (spec.num_heads * spec.key_width, spec.num_heads * spec.shared_width)
    parts = operands.queries.double().split_with_sizes(widths, dim=1)
    own, shared = (part.view(len(part), spec.num_heads, -1) for part in parts)
    rows, size = [], operands.pages.shape[1]
    for row, context in enumerate(operands.batch.context_lengths_host):
        table = operands.batch.block_tables[row, : -(-context // size)].long()
        pages = operands.pages[table].flatten(0, 1)[:context, : spec.absorbed_width].double()
        vectors, common = pages.split_with_sizes((spec.latent_width, spec.shared_width), dim=1)
        scores = torch.einsum("hk,hkl->hl", own[row], keys) @ vectors.T
        scores += shared[row] @ common.T
        weights = (scores * spec.scale).softmax(dim=1)
        rows.append(torch.einsum("hl,hvl->hv", weights @ vectors, values).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_decodes_equal_attention_to_the_keys_of_each_head(
    kernels: Native, dtype: torch.dtype, name: str
) -> None:
    """Stale data behind a context are NaNs, which no output may show."""
    spec = SHAPES[name]
    operands = make_operands(spec, [1, 33, 128, 129, 300], dtype)
    out = attend(kernels, spec, operands)
    tolerance = TOLERANCES[dtype]
    expected = defined(spec, operands)
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("block_size", [1, 16, 32, 64])
def test_contexts_of_many_parts_and_any_block_size(kernels: Native, block_size: int) -> None:
    operands = make_operands(_PLAIN, [4_097, 5_000, 9_001], block_size=block_size)
    out = attend(kernels, _PLAIN, operands)
    torch.testing.assert_close(out.double(), defined(_PLAIN, operands), atol=1e-5, rtol=1e-5)


def test_more_sequences_than_fit_the_memory_at_once(kernels: Native) -> None:
    """Five contexts of 32 parts take more than the kernel holds."""
    spec = replace(_PLAIN, num_heads=128, latent_width=512, key_width=4, value_width=4)
    operands = make_operands(spec, [4_096] * 5)
    out = attend(kernels, spec, operands)
    torch.testing.assert_close(out.double(), defined(spec, operands), atol=1e-4, rtol=1e-4)


def test_latents_are_written_before_what_else_a_page_holds(kernels: Native) -> None:
    """An indexer's keys lie behind the latents: overwriting them changes what it chooses."""
    operands = make_operands(_PLAIN, [1, 40, 70], extra=8)
    attend(kernels, _PLAIN, operands)
    written = operands.pages.flatten(0, 1)[operands.batch.slots]
    assert torch.equal(written[:, : _PLAIN.absorbed_width], operands.latents)
    assert operands.pages[..., _PLAIN.absorbed_width :].isnan().all()


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_an_output_does_not_depend_on_the_other_sequences(kernels: Native, count: int) -> None:
    """Otherwise a seed would not give the same text twice."""
    spec = SHAPES["odd sizes"]
    operands = make_operands(spec, [900, 35, 7, 128, 200, 5, 77, 31])
    together = attend(kernels, spec, operands)
    batch = replace(
        operands.batch,
        slots=operands.batch.slots[:count],
        context_lengths=operands.batch.context_lengths[:count],
        num_decodes=count,
    )
    some = replace(operands, batch=batch, queries=operands.queries[:count])
    assert torch.equal(attend(kernels, spec, some), together[:count])


def test_large_scores_stay_finite(kernels: Native) -> None:
    operands = make_operands(_PLAIN, [300])
    operands.queries.mul_(1e4)
    out = attend(kernels, _PLAIN, operands)
    assert out.isfinite().all()
    torch.testing.assert_close(out.double(), defined(_PLAIN, operands), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_query_gives_no_numbers_and_leaves_others_alone(
    kernels: Native, broken: float
) -> None:
    """Such a row ends its request; a number in its place would be taken for an answer."""
    operands = make_operands(_PLAIN, [2, 1, 300])
    clean = attend(kernels, _PLAIN, operands)
    operands.queries[1] = broken
    out = attend(kernels, _PLAIN, operands)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
