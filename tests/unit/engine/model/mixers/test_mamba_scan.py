"""The state space scan equals its definition, however its tokens are divided."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from services.engine.kernels.library import InstructionSet
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.mixers.gated_norm import GatedNorm
from services.engine.model.mixers.mamba_scan import (
    MambaConstants,
    MambaInputs,
    MambaScan,
    MambaState,
)
from services.engine.model.mixers.native_mamba_scan import NativeMambaScan
from services.engine.model.mixers.runs import RunGroups
from services.engine.model.mixers.torch_mamba_scan import TorchMambaScan
from tests.unit.engine.machines import restrict_kernels
from tests.unit.engine.model.mixers.delta_steps import (
    Run,
    assert_equal_in_any_steps,
    make_segments,
)

TOKENS = 150
"""Tokens of a whole prompt: two chunks and a part of one"""
KERNELS = (InstructionSet.BASELINE, InstructionSet.AVX2, InstructionSet.AVX512)
"""Instruction sets with kernels of their own"""
_PLAIN = MambaShape(
    heads=4,
    head_dim=64,
    groups=2,
    state_width=16,
    conv_width=4,
    has_conv_bias=True,
    has_bias=False,
    has_output_bias=False,
    norm_width=128,
    norms_first=False,
    norm_epsilon=1e-5,
    least_step=0.0,
    most_step=torch.inf,
)
SHAPES = {
    "plain": _PLAIN,
    "bounded steps": replace(_PLAIN, least_step=0.1, most_step=0.5),
    "norm before the gate": replace(_PLAIN, norms_first=True),
    "gate alone": replace(_PLAIN, norm_width=0, groups=1),
    "odd sizes": replace(
        _PLAIN, heads=3, head_dim=20, groups=1, state_width=7, conv_width=3, norm_width=60
    ),
}
MakeScan = Callable[[MambaShape, torch.dtype], MambaScan]


@pytest.fixture(
    scope="module", params=[None, *KERNELS], ids=["torch", *(each.name for each in KERNELS)]
)
def make_scan(request: pytest.FixtureRequest) -> Iterator[MakeScan]:
    """Torch, and the kernels on each instruction set that has some of its own."""
    if request.param is None:
        device = torch.device("cpu")
        yield lambda shape, dtype: TorchMambaScan(shape, dtype, device, RunGroups())
        return
    with restrict_kernels(request.param) as kernels:
        yield lambda shape, dtype: NativeMambaScan(kernels, shape, dtype)


def make_constants(shape: MambaShape) -> MambaConstants:
    torch.manual_seed(1)
    norm = 1 + torch.randn(shape.outputs) / 4 if shape.norm_width else None
    return MambaConstants(
        torch.randn(shape.conv_width, shape.channels) / 2,
        torch.randn(shape.channels) / 2,
        torch.empty(shape.heads).uniform_(0.01, 16),
        torch.randn(shape.heads) - 2,
        torch.randn(shape.heads),
        GatedNorm.of(shape, norm, None),
    )


def make_operands(shape: MambaShape) -> Tensor:
    """Make a prompt's gates, inputs of the convolution, and time steps side by side."""
    torch.manual_seed(2)
    return torch.randn(TOKENS, shape.outputs + shape.channels + shape.heads)


def apply(
    scan: MambaScan, shape: MambaShape, operands: Tensor, state: MambaState, runs: Sequence[Run]
) -> Tensor:
    """Run a step, and return its outputs."""
    widths = (shape.outputs, shape.channels, shape.heads)
    gate, mixed, steps = operands.split_with_sizes(widths, dim=1)
    inputs = MambaInputs(
        gate,
        mixed,
        steps,
        torch.full(gate.shape, torch.nan, dtype=operands.dtype),
        torch.full(mixed.shape, torch.nan),
        torch.full(gate.shape, torch.nan),
    )
    scan.apply(make_constants(shape), inputs, state, make_segments(runs))
    return inputs.out


def defined(shape: MambaShape, operands: Tensor) -> Tensor:
    """Compute a prompt's outputs token by token in float64."""
    constants = make_constants(shape)
    widths = (shape.outputs, shape.channels, shape.heads)
    gate, mixed, steps = operands.double().split_with_sizes(widths, dim=1)
    past = torch.cat((mixed.new_zeros(shape.conv_width - 1, shape.channels), mixed))
    windows = past.unfold(0, shape.conv_width, 1)  # [tokens, channels, conv_width]
    assert constants.convolution_bias is not None
    convolved = (windows * constants.convolution.T).sum(2) + constants.convolution_bias
    parts = (shape.outputs, shape.factors, shape.factors)
    x, opened, closed = functional.silu(convolved).split_with_sizes(parts, dim=1)
    x = x.view(TOKENS, shape.heads, -1)
    opened, closed = (
        each.view(TOKENS, shape.groups, -1).repeat_interleave(shape.heads // shape.groups, 1)
        for each in (opened, closed)
    )
    taken = functional.softplus(steps + constants.step_bias)
    taken = taken.clamp(shape.least_step, shape.most_step)
    state = torch.zeros(shape.heads, shape.state_width, shape.head_dim, dtype=torch.float64)
    rows = []
    for token in range(TOKENS):
        step = taken[token, :, None, None]
        state = (-constants.rates[:, None, None] * step).exp() * state
        state = state + step * opened[token, :, :, None] * x[token, :, None]
        out = (closed[token, :, :, None] * state).sum(1)
        rows.append(out + constants.skip[:, None] * x[token])
    return constants.norm.apply(torch.stack(rows).flatten(1), gate.double())


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
        lambda rows, runs: apply(scan, shape, rows, state, runs), operands, expected, chunk=70
    )


def test_bfloat16_stays_close_to_float32(make_scan: MakeScan) -> None:
    operands = make_operands(_PLAIN).bfloat16()
    expected = defined(_PLAIN, operands)
    scan = make_scan(_PLAIN, torch.bfloat16)
    ours = apply(scan, _PLAIN, operands, scan.allocate(1), [Run(TOKENS, -1, 0)])
    assert (ours - expected).abs().max() < 2**-7 * expected.abs().max()
