"""Mixtures of experts in one kernel: the same as expert by expert, for each row by itself."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from services.engine.kernels.library import InstructionSet, Native, Numbers
from services.engine.model.architecture.activation import SWIGLU, Activation, Nonlinearity
from services.engine.model.architecture.routing import Routing, Scoring
from services.engine.model.checkpoint.quantized import GroupNumbers, QuantizedWeight, Weight
from services.engine.model.operators.expert_choice import choose_experts
from services.engine.model.operators.grouped_operators import GroupedOperators
from services.engine.model.operators.interface import (
    ExpertWeights,
    Mixture,
    Operators,
    Projection,
    SharedParts,
)
from services.engine.model.operators.looped_mixture import LoopedMixture
from services.engine.model.operators.native_mixture import NativeMixture
from services.engine.model.operators.native_operators import NativeOperators
from services.engine.model.operators.rounded_operators import (
    ByteOperators,
    Int8Operators,
    RoundedTiledOperators,
)
from services.engine.model.operators.tiled_operators import TiledOperators
from services.engine.model.parts.feed_forward import Dense, Experts, NormedExperts, SharedExpert
from tests.unit.engine.kernels.test_grouped import random_weight
from tests.unit.engine.machines import TILED, restrict_kernels
from tests.unit.engine.tiles import to_tiles

HIDDEN = 128
WIDTH = 64
EXPERTS = 9
PER_ROW = 3
CLAMPED = Activation(Nonlinearity.CLAMPED_SWIGLU, alpha=1.7, limit=2.5)
GELU = Activation(Nonlinearity.GELU_TANH)
VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""E2M1, doubled: codes of MXFP4"""

Make = Callable[[Native], Operators]
Stored = Callable[[int, int], Weight]


def plain_weight(outputs: int, inputs: int) -> Tensor:
    return torch.randn(outputs, inputs).div(inputs**0.5)


def grouped_weight(outputs: int, inputs: int) -> QuantizedWeight:
    return random_weight(outputs, inputs, 4, 32)


def six_bit_weight(outputs: int, inputs: int) -> QuantizedWeight:
    return random_weight(outputs, inputs, 6, 16, numbers=Numbers.FLOATS, zero=True)


def mxfp4_weight(outputs: int, inputs: int) -> QuantizedWeight:
    codes = torch.randint(16, (outputs, inputs), dtype=torch.uint8)
    exponents = torch.randint(119, 123, (outputs, inputs // 32), dtype=torch.uint8)
    return QuantizedWeight(codes, 4, GroupNumbers(exponents), None, values=VALUES)


@dataclass(frozen=True, slots=True)
class Kind:
    """Operators on one instruction set, and the form of the experts' weights."""

    instructions: InstructionSet
    make: Make
    stored: Stored
    dtype: torch.dtype = torch.bfloat16

    @property
    def is_tiled(self) -> bool:
        return self.instructions in TILED


_TILED_FORMS: dict[str, tuple[Make, Stored]] = {
    "bfloat16": (TiledOperators, plain_weight),
    "int8": (Int8Operators, plain_weight),
    "bytes": (lambda native: ByteOperators(native, rounds=True), plain_weight),
    "rounded": (RoundedTiledOperators, plain_weight),
    "groups": (TiledOperators, grouped_weight),
    "6 bits": (TiledOperators, six_bit_weight),
    "mxfp4": (TiledOperators, mxfp4_weight),
}
_PORTABLE = (InstructionSet.BASELINE, InstructionSet.AVX2, InstructionSet.AVX512)
KINDS = {
    f"{instructions.name}, {name}": Kind(instructions, *form)
    for instructions in TILED
    for name, form in _TILED_FORMS.items()
} | {
    f"{instructions.name}, {name}, {dtype}": Kind(
        instructions, partial(GroupedOperators, dtype=dtype), stored, dtype
    )
    for instructions in _PORTABLE
    for name, stored in (("groups", grouped_weight), ("mxfp4", mxfp4_weight))
    for dtype in (torch.float32, torch.bfloat16)
}


class Case:
    """The same experts as one kernel and as a loop."""

    def __init__(self, kind: Kind, native: Native) -> None:
        self.kind = kind
        self.operators = kind.make(native)

    def mixtures(self, activation: Activation, *, biases: bool) -> tuple[Mixture, LoopedMixture]:
        experts = [self._expert(biases) for _ in range(EXPERTS)]
        together = self.operators.mixture(experts, EXPERTS, PER_ROW, activation)
        assert isinstance(together, NativeMixture)
        return together, LoopedMixture(experts, activation, self.operators)

    def _expert(self, biases: bool) -> ExpertWeights:
        gate, up = (self.kind.stored(WIDTH, HIDDEN) for _ in range(2))
        sizes = (WIDTH, WIDTH, HIDDEN)
        each = [torch.randn(size) if biases else None for size in sizes]
        return ExpertWeights(gate, up, self.kind.stored(HIDDEN, WIDTH), *each)

    def arranged(self, rows: Tensor) -> Tensor:
        return to_tiles(rows)[: len(rows)] if self.kind.is_tiled else rows

    def sum(self, mixture: Mixture, rows: Tensor, chosen: Tensor, factors: Tensor) -> Tensor:
        out = torch.ones(len(rows), HIDDEN)
        mixture.add_to(self.arranged(rows), chosen, factors, out)
        return out


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS))
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with restrict_kernels(request.param.instructions) as native:
        yield Case(request.param, native)
        native.use_pool(0)


def random_choice(count: int) -> tuple[Tensor, Tensor]:
    chosen = torch.stack([torch.randperm(EXPERTS)[:PER_ROW] for _ in range(count)])
    return chosen, torch.rand(count, PER_ROW)


@pytest.mark.parametrize(
    ("activation", "biases"),
    [(SWIGLU, False), (CLAMPED, True), (GELU, False)],
    ids=["silu", "clamped, biases", "gelu"],
)
def test_mixture_equals_the_loop_over_its_experts(
    case: Case, activation: Activation, biases: bool
) -> None:
    torch.manual_seed(1)
    together, looped = case.mixtures(activation, biases=biases)
    for count in (1, 2, 9, 40, 150):
        rows = torch.randn(count, HIDDEN, dtype=case.kind.dtype)
        choice = random_choice(count)
        ours, theirs = (case.sum(each, rows, *choice) for each in (together, looped))
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_experts_without_weights_return_the_row(case: Case) -> None:
    """LongCat-Flash; a row may have several of them, or nothing else."""
    torch.manual_seed(7)
    together, looped = case.mixtures(SWIGLU, biases=False)
    for count in (1, 9, 40):
        rows = torch.randn(count, HIDDEN, dtype=case.kind.dtype)
        chosen = torch.stack([torch.randperm(EXPERTS + 4)[:PER_ROW] for _ in range(count)])
        chosen[0] = torch.arange(EXPERTS, EXPERTS + PER_ROW)
        factors = torch.rand(count, PER_ROW)
        weights = factors.masked_fill(chosen < EXPERTS, 0).sum(dim=1, keepdim=True)
        has_weights = factors.masked_fill(chosen >= EXPERTS, 0)
        own = case.sum(looped, rows, chosen, has_weights)
        for mixture in (together, looped):
            ours = case.sum(mixture, rows, chosen, factors)
            torch.testing.assert_close(ours, own + rows * weights, atol=1e-5, rtol=1e-5)


def test_all_rows_may_have_the_same_experts(case: Case) -> None:
    torch.manual_seed(2)
    together, looped = case.mixtures(SWIGLU, biases=True)
    rows = torch.randn(70, HIDDEN, dtype=case.kind.dtype)
    choice = torch.tensor([[8, 0, 3]]).expand(70, 3), torch.rand(70, 3)
    ours, theirs = (case.sum(each, rows, *choice) for each in (together, looped))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_row_of_a_few_is_the_same_alone_and_beside_others(case: Case) -> None:
    """A request computes the same, whatever runs beside it."""
    torch.manual_seed(3)
    mixture, _ = case.mixtures(SWIGLU, biases=False)
    rows, (chosen, factors) = torch.randn(8, HIDDEN, dtype=case.kind.dtype), random_choice(8)
    beside = case.sum(mixture, rows, chosen, factors)
    for row in range(8):
        only = slice(row, row + 1)
        alone = case.sum(mixture, rows[only], chosen[only], factors[only])
        assert torch.equal(alone[0], beside[row])


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_row_leaves_those_with_its_experts_alone(case: Case, broken: float) -> None:
    torch.manual_seed(4)
    mixture, _ = case.mixtures(SWIGLU, biases=False)
    rows, (chosen, factors) = torch.randn(5, HIDDEN, dtype=case.kind.dtype), random_choice(5)
    chosen[2] = chosen[1]
    clean = case.sum(mixture, rows, chosen, factors)
    rows[1, 7] = broken
    out = case.sum(mixture, rows, chosen, factors)
    assert not out[1].isfinite().all()
    others = [0, 2, 3, 4]
    assert torch.equal(out[others], clean[others])


class _Layer:
    """A whole layer with a shared expert, as one kernel and in parts."""

    def __init__(self, case: Case, routing: Routing, *, shares: bool, weighs: bool) -> None:
        operators = case.operators
        together, looped = case.mixtures(SWIGLU, biases=True)
        router = operators.exact_projection(plain_weight(EXPERTS, HIDDEN), torch.randn(EXPERTS))
        bias = torch.randn(EXPERTS) if routing.has_bias else None
        shared = self._shared(operators, weighs) if shares else None
        parts = None if shared is None else shared.parts
        self.whole = self._experts(operators, router, together, routing, bias, shared, parts)
        self.parted = self._experts(operators, router, looped, routing, bias, shared, None)

    def _shared(self, operators: Operators, weighs: bool) -> SharedExpert:
        first, second = (plain_weight(2 * WIDTH, HIDDEN) for _ in range(2))
        gate = operators.gate(first, second, None, None)
        down = operators.projection(plain_weight(HIDDEN, 2 * WIDTH), None)
        logit = operators.exact_projection(plain_weight(1, HIDDEN), None) if weighs else None
        return SharedExpert(Dense(gate, down), logit, operators)

    def _experts(
        self,
        operators: Operators,
        router: Projection,
        mixture: Mixture,
        routing: Routing,
        bias: Tensor | None,
        shared: SharedExpert | None,
        parts: SharedParts | None,
    ) -> Experts:
        routed = mixture.routed(router, routing, bias, parts)
        return Experts(router, mixture, EXPERTS, routing, bias, operators, shared, routed)


ROUTINGS = [
    Routing(PER_ROW, normalized=True),
    Routing(PER_ROW, normalized=False, has_bias=True, least_sum=0.5, scale=1.5),
    Routing(PER_ROW, normalized=True, scoring=Scoring.SIGMOID, groups=3, kept_groups=2, scale=2.5),
    Routing(PER_ROW, normalized=False, jitter=0.2),
]


@pytest.mark.parametrize("routing", ROUTINGS, ids=["softmax", "bias", "groups", "sparse"])
@pytest.mark.parametrize("shared", ["no", "whole", "weighed"])
@pytest.mark.parametrize("instructions", TILED, ids=lambda each: each.name)
def test_layer_in_one_kernel_equals_its_parts(
    instructions: InstructionSet, routing: Routing, shared: str
) -> None:
    torch.manual_seed(5)
    with restrict_kernels(instructions) as native:
        case = Case(Kind(instructions, TiledOperators, grouped_weight), native)
        layer = _Layer(case, routing, shares=shared != "no", weighs=shared == "weighed")
        assert layer.whole.routed is not None
        for count in (1, 5, 70):
            rows = case.arranged(torch.randn(count, HIDDEN, dtype=torch.bfloat16))
            inner = case.operators.empty(count, 2 * WIDTH)
            ours, theirs = torch.ones(2, count, HIDDEN)
            layer.whole.add_to(rows, ours, inner, ())
            layer.parted.add_to(rows, theirs, inner, ())
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
        native.use_pool(0)


@pytest.mark.parametrize("instructions", TILED, ids=lambda each: each.name)
def test_experts_with_norms_of_their_own_equal_their_parts(instructions: InstructionSet) -> None:
    """Gemma 4's router reads other rows than its experts, which have a factor each."""
    torch.manual_seed(6)
    with restrict_kernels(instructions) as native:
        case = Case(Kind(instructions, TiledOperators, grouped_weight), native)
        operators, routing = case.operators, Routing(PER_ROW, normalized=True)
        together, looped = case.mixtures(GELU, biases=False)
        router = operators.exact_projection(plain_weight(EXPERTS, HIDDEN), None)
        norms = torch.randn(2, HIDDEN, dtype=torch.bfloat16)
        factors = torch.rand(EXPERTS)
        routed = together.routed(router, routing, None, None, factors)
        assert routed is not None
        whole, parted = (
            NormedExperts(
                norms[0], router, norms[1], mixture, routing, factors, 1e-6, operators, by
            )
            for mixture, by in ((together, routed), (looped, None))
        )
        for count in (1, 5, 70):
            rows = torch.randn(count, HIDDEN, dtype=torch.bfloat16)
            spares = [operators.empty(count, HIDDEN) for _ in range(2)]
            ours, theirs = torch.ones(2, count, HIDDEN)
            whole.add_to(rows, ours, torch.empty(0), spares)
            parted.add_to(rows, theirs, torch.empty(0), spares)
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
        native.use_pool(0)


@pytest.mark.parametrize("instructions", TILED, ids=lambda each: each.name)
def test_row_without_numbers_gives_none_in_its_layer(instructions: InstructionSet) -> None:
    """Such a row ends its request; it has experts, though no score is a number."""
    with restrict_kernels(instructions) as native:
        case = Case(Kind(instructions, TiledOperators, grouped_weight), native)
        layer = _Layer(case, ROUTINGS[2], shares=True, weighs=True).whole
        rows = torch.randn(3, HIDDEN, dtype=torch.bfloat16)
        clean, out = torch.zeros(2, 3, HIDDEN)
        layer.add_to(case.arranged(rows), clean, torch.empty(0), ())
        rows[1, 0] = torch.nan
        layer.add_to(case.arranged(rows), out, torch.empty(0), ())
        assert out[1].isnan().all()
        assert torch.equal(out[[0, 2]], clean[[0, 2]])
        native.use_pool(0)


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 40),
    groups=st.integers(1, 4),
    size=st.integers(2, 33),
    scoring=st.sampled_from((Scoring.SOFTMAX, Scoring.SIGMOID)),
    normalized=st.booleans(),
    has_bias=st.booleans(),
)
@pytest.mark.parametrize("instructions", _PORTABLE, ids=lambda each: each.name)
def test_kernel_chooses_as_torch_does(
    instructions: InstructionSet,
    seed: int,
    rows: int,
    groups: int,
    size: int,
    scoring: Scoring,
    normalized: bool,
    has_bias: bool,
) -> None:
    torch.manual_seed(seed)
    kept = int(torch.randint(1, groups + 1, ()))
    per_row = int(torch.randint(1, kept * size + 1, ()))
    routing = Routing(
        per_row,
        normalized,
        has_bias=has_bias,
        least_sum=0.25,
        scoring=scoring,
        groups=groups,
        kept_groups=kept,
        group_leaders=int(torch.randint(1, size + 1, ())),
        scale=1.5,
    )
    scores = 3 * torch.randn(rows, groups * size)
    bias = torch.randn(groups * size) if has_bias else None
    with restrict_kernels(instructions) as native:
        chosen, factors = NativeOperators(native, torch.float32).choose(scores, routing, bias)
    expected, weights = choose_experts(routing, scores, bias)
    # Nearly equal scores may be chosen in either order.
    ours, theirs = (
        torch.zeros(rows, groups * size).scatter(1, *each)
        for each in ((chosen, factors), (expected, weights))
    )
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert all(len(set(row)) == per_row for row in chosen.tolist())


@given(seed=st.integers(0, 2**32), rows=st.integers(1, 40), experts=st.integers(2, 70))
@pytest.mark.parametrize("instructions", _PORTABLE, ids=lambda each: each.name)
def test_kernel_mixes_sparsely_as_torch_does(
    instructions: InstructionSet, seed: int, rows: int, experts: int
) -> None:
    torch.manual_seed(seed)
    routing = Routing(2, normalized=False, jitter=float(torch.rand(())))
    scores = 3 * torch.randn(rows, experts)
    with restrict_kernels(instructions) as native:
        chosen, factors = NativeOperators(native, torch.float32).choose(scores, routing, None)
    wanted = choose_experts(routing, scores, None)
    assert torch.equal(chosen, wanted[0])
    torch.testing.assert_close(factors, wanted[1])


@pytest.mark.parametrize("scoring", [Scoring.SOFTMAX, Scoring.SIGMOID])
@pytest.mark.parametrize("instructions", _PORTABLE, ids=lambda each: each.name)
def test_scores_without_numbers_choose_different_experts(
    instructions: InstructionSet, scoring: Scoring
) -> None:
    """An expert that does not exist, or one twice, would write past the rows of others."""
    routing = Routing(4, normalized=True, scoring=scoring, groups=2, kept_groups=1)
    scores = torch.full((2, 12), torch.nan)
    scores[1, 3] = torch.inf
    with restrict_kernels(instructions) as native:
        chosen, factors = NativeOperators(native, torch.float32).choose(scores, routing, None)
    for row in chosen.tolist():
        assert len(set(row)) == 4
        assert set(row) <= set(range(12))
    assert factors.isnan().all()
