"""The selective scan equals its definition, however its tokens are divided."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.library import InstructionSet
from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.mixers.native_selective_scan import NativeSelectiveScan
from services.engine.model.mixers.runs import RunGroups
from services.engine.model.mixers.selective_scan import (
    SelectiveConstants,
    SelectiveInputs,
    SelectiveScan,
    SelectiveState,
)
from services.engine.model.mixers.torch_selective_scan import TorchSelectiveScan
from tests.unit.engine.machines import restrict_kernels
from tests.unit.engine.model.mixers.delta_steps import (
    Run,
    assert_equal_in_any_steps,
    make_segments,
)

TOKENS = 110
"""Tokens of a whole prompt: three chunks and a part of one"""
KERNELS = (InstructionSet.BASELINE, InstructionSet.AVX2, InstructionSet.AVX512)
"""Instruction sets with kernels of their own"""
_PLAIN = SelectiveShape(
    channels=128,
    state_width=16,
    step_rank=8,
    conv_width=4,
    has_conv_bias=True,
    has_bias=False,
    has_norms=False,
    norm_epsilon=1e-5,
)
SHAPES = {
    "plain": _PLAIN,
    "odd sizes": replace(_PLAIN, channels=333, state_width=7, conv_width=3),
    "no bias": replace(_PLAIN, channels=40, has_conv_bias=False),
}
MakeScan = Callable[[SelectiveShape, torch.dtype], SelectiveScan]


@pytest.fixture(
    scope="module", params=[None, *KERNELS], ids=["torch", *(each.name for each in KERNELS)]
)
def make_scan(request: pytest.FixtureRequest) -> Iterator[MakeScan]:
    """Torch, and the kernels on each instruction set that has some of its own."""
    if request.param is None:
        device = torch.device("cpu")
        yield lambda shape, dtype: TorchSelectiveScan(shape, dtype, device, RunGroups())
        return
    with restrict_kernels(request.param) as kernels:
        yield lambda shape, dtype: NativeSelectiveScan(kernels, shape, dtype)


def make_constants(shape: SelectiveShape) -> SelectiveConstants:
    torch.manual_seed(1)
    return SelectiveConstants(
        torch.randn(shape.conv_width, shape.channels) / 2,
        torch.randn(shape.channels) / 2 if shape.has_conv_bias else None,
        torch.empty(shape.state_width, shape.channels).uniform_(0.01, 16),
        3 * torch.randn(shape.channels),
        torch.randn(shape.channels),
    )


def make_operands(shape: SelectiveShape) -> Tensor:
    """Make a prompt's inputs of the convolution, gates, time steps and factors side by side."""
    torch.manual_seed(2)
    return torch.randn(TOKENS, 3 * shape.channels + 2 * shape.state_width)


def apply(
    scan: SelectiveScan,
    shape: SelectiveShape,
    operands: Tensor,
    state: SelectiveState,
    runs: Sequence[Run],
) -> Tensor:
    """Run a step, and return its outputs."""
    widths = (*(shape.channels for _ in range(3)), shape.state_width, shape.state_width)
    mixed, gate, *others = operands.split_with_sizes(widths, dim=1)
    steps, opened, closed = (each.contiguous() for each in others)
    convolved, out = (torch.full(steps.shape, torch.nan, dtype=operands.dtype) for _ in range(2))
    constants, segments = make_constants(shape), make_segments(runs)
    scan.convolve(constants, mixed, state, segments, convolved)
    inputs = SelectiveInputs(convolved, gate, steps, opened.float(), closed.float(), out)
    scan.apply(constants, inputs, state, segments)
    return out


def defined(shape: SelectiveShape, operands: Tensor) -> Tensor:
    """Compute a prompt's outputs token by token in float64."""
    constants = make_constants(shape)
    widths = (*(shape.channels for _ in range(3)), shape.state_width, shape.state_width)
    mixed, gate, steps, opened, closed = operands.double().split_with_sizes(widths, dim=1)
    past = torch.cat((mixed.new_zeros(shape.conv_width - 1, shape.channels), mixed))
    windows = past.unfold(0, shape.conv_width, 1)  # [tokens, channels, conv_width]
    x = (windows * constants.convolution.T).sum(2)
    if constants.convolution_bias is not None:
        x = x + constants.convolution_bias
    x = functional.silu(x)
    taken = functional.softplus(steps + constants.step_bias)
    state, rows = torch.zeros(shape.state_width, shape.channels, dtype=torch.float64), []
    for token in range(TOKENS):
        state = (-constants.rates * taken[token]).exp() * state
        state = state + opened[token, :, None] * (taken[token] * x[token])
        rows.append(closed[token] @ state + constants.skip * x[token])
    return torch.stack(rows) * functional.silu(gate)


@pytest.mark.parametrize("name", SHAPES)
def test_scan_equals_its_definition_however_tokens_are_divided(
    name: str, make_scan: MakeScan
) -> None:
    """At once, in chunks behind snapshots, token by token, and beside another sequence."""
    shape = SHAPES[name]
    operands, scan = make_operands(shape), make_scan(shape, torch.float32)
    expected = defined(shape, operands).float()
    state = scan.allocate(12)
    for each in (state.last, state.states):  # slots that are reused hold anything
        each.fill_(torch.nan)
    assert_equal_in_any_steps(
        lambda rows, runs: apply(scan, shape, rows, state, runs), operands, expected, chunk=40
    )


def test_bfloat16_stays_close_to_float32(make_scan: MakeScan) -> None:
    operands = make_operands(_PLAIN).bfloat16()
    expected = defined(_PLAIN, operands)
    scan = make_scan(_PLAIN, torch.bfloat16)
    ours = apply(scan, _PLAIN, operands, scan.allocate(1), [Run(TOKENS, -1, 0)])
    assert (ours - expected).abs().max() < 2**-6 * expected.abs().max()
