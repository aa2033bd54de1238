"""The gated delta rule equals the published layers, however its tokens are divided."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from random import Random

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import KimiLinearConfig, OlmoHybridConfig, Qwen3_5TextConfig
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from services.engine.batch.step_batch import StepBatch
from services.engine.kernels.library import InstructionSet, native
from services.engine.kernels.structures import OperationCall
from services.engine.model.mixers.delta_rule import (
    DeltaInputs,
    DeltaRule,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    OutputGate,
)
from services.engine.model.mixers.native_delta_rule import NativeDeltaRule
from services.engine.model.mixers.torch_delta_rule import TorchDeltaRule
from services.engine.model.operators.recording import Recording
from tests.unit.engine.machines import restrict_kernels
from tests.unit.engine.model.mixers.delta_steps import (
    SHAPES,
    Run,
    apply,
    make_operands,
    make_segments,
    make_weights,
    split_operands,
)

CPU = torch.device("cpu")
TOKENS = 150
"""Tokens of a whole prompt: two chunks and a part of one"""

KERNELS = (InstructionSet.BASELINE, InstructionSet.AVX2, InstructionSet.AVX512)
"""Instruction sets with kernels of their own"""

MakeRule = Callable[[DeltaShape, torch.dtype], DeltaRule]


@pytest.fixture(
    scope="module", params=[None, *KERNELS], ids=["torch", *(each.name for each in KERNELS)]
)
def make_rule(request: pytest.FixtureRequest) -> Iterator[MakeRule]:
    """Torch, and the kernels on each instruction set that has some of its own."""
    if request.param is None:
        yield lambda shape, dtype: TorchDeltaRule(shape, dtype, CPU)
        return
    with restrict_kernels(request.param) as kernels:
        yield lambda shape, dtype: NativeDeltaRule(kernels, shape, dtype)


@dataclass(frozen=True, slots=True)
class Published:
    """A layer of transformers, and its projections."""

    shape: DeltaShape
    layer: nn.Module
    convolution: nn.Conv1d
    norm: Tensor
    rates: Tensor
    decay_bias: Tensor
    output: nn.Module
    project: Callable[[Tensor], tuple[Tensor, Tensor, Tensor, Tensor]]
    """Returns mixed, gate, beta and decay"""


def qwen() -> Published:
    config = Qwen3_5TextConfig(
        hidden_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
    net = Qwen3_5GatedDeltaNet(config, 0)  # type: ignore[arg-type]
    return Published(
        DeltaShape(2, 4, 16, 32, config.linear_conv_kernel_dim, config.rms_norm_eps),
        net,
        net.conv1d,
        net.norm.weight,
        net.A_log,
        net.dt_bias,
        net.out_proj,
        lambda x: (net.in_proj_qkv(x), net.in_proj_z(x), net.in_proj_b(x), net.in_proj_a(x)),
    )


def olmo() -> Published:
    config = OlmoHybridConfig(
        hidden_size=64,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=12,
        linear_value_head_dim=24,
        linear_allow_neg_eigval=True,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
    net = OlmoHybridGatedDeltaNet(config, 0)

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed = torch.cat((net.q_proj(x), net.k_proj(x), net.v_proj(x)), -1)
        return mixed, net.g_proj(x), net.b_proj(x), net.a_proj(x)

    shape = DeltaShape(2, 2, 12, 24, config.linear_conv_kernel_dim, 1e-5, doubles_beta=True)
    return Published(
        shape, net, net.conv1d, net.o_norm.weight, net.A_log, net.dt_bias, net.o_proj, project
    )


def kimi() -> Published:
    config = KimiLinearConfig(
        hidden_size=64,
        linear_num_heads=3,
        linear_head_dim=16,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
    )
    net = KimiLinearDeltaAttention(config, 0)
    forget = net.forget_gate

    def project(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mixed = torch.cat((net.q_proj(x), net.k_proj(x), net.v_proj(x)), -1)
        return (
            mixed,
            net.g_b_proj(net.g_a_proj(x)),
            net.b_proj(x),
            forget.f_b_proj(forget.f_a_proj(x)),
        )

    shape = DeltaShape(
        *(3, 3, 16, 16, config.linear_conv_kernel_dim, config.rms_norm_eps),
        gate=OutputGate.SIGMOID,
        decays_channels=True,
    )
    return Published(
        shape, net, net.conv1d, net.o_norm.weight, forget.A_log, forget.dt_bias, net.o_proj, project
    )


@pytest.mark.parametrize("publish", [qwen, olmo, kimi])
@pytest.mark.parametrize("lengths", [(TOKENS,), (1,) * 20, (64, 1, 1, 17, 67)], ids=str)
@torch.inference_mode()
def test_outputs_equal_those_of_the_published_layer(
    make_rule: MakeRule, publish: Callable[[], Published], lengths: Sequence[int]
) -> None:
    torch.manual_seed(0)
    published = publish()
    for parameter in published.layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    nn.init.uniform_(published.rates, -2, 2)
    x = torch.randn(1, sum(lengths), 64)
    expected: list[Tensor] = []
    published.output.register_forward_pre_hook(lambda _, args: expected.append(args[0][0]))
    published.layer(x)

    weights = DeltaWeights.prepare(
        published.convolution.weight,
        published.convolution.bias,
        published.rates,
        published.decay_bias,
        published.norm,
    )
    mixed, gate, beta, decay = (each[0] for each in published.project(x))
    inputs = DeltaInputs(mixed, gate, beta, decay, torch.empty_like(gate))
    rule = make_rule(published.shape, torch.float32)
    state = rule.allocate(len(lengths))
    runs = [Run(length, index - 1, index) for index, length in enumerate(lengths)]
    out = apply(rule, weights, inputs, state, runs)
    tolerance = 1e-5 if isinstance(rule, TorchDeltaRule) else 1e-4
    torch.testing.assert_close(out, expected[0], atol=tolerance, rtol=tolerance)


@st.composite
def divisions(draw: st.DrawFn) -> list[list[int]]:
    """Draw the lengths of a sequence's runs in each step."""
    steps: list[list[int]] = [[]]
    left = TOKENS
    while left:
        length = min(left, draw(st.sampled_from((1, 1, 1, 2, 3, 16, 63, 64, 65, 100))))
        steps[-1].append(length)
        left -= length
        if draw(st.booleans()):
            steps.append([])
    return steps


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=4, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(steps=st.lists(divisions(), min_size=1, max_size=3), order=st.randoms())
@torch.inference_mode()
def test_division_into_runs_steps_and_slots_changes_nothing(
    make_rule: MakeRule, name: str, steps: list[list[list[int]]], order: Random
) -> None:
    """Otherwise a cached prefix, a preemption or another request would change an answer."""
    shape, sequences = SHAPES[name], range(len(steps))
    torch.manual_seed(0)
    rule, weights = make_rule(shape, torch.float32), make_weights(shape, biased=True)
    operands = torch.stack([make_operands(shape, TOKENS) for _ in sequences])
    whole = rule.allocate(len(steps))
    runs = [Run(TOKENS, -1, slot) for slot in sequences]
    expected = apply(rule, weights, split_operands(shape, operands.flatten(0, 1)), whole, runs)

    free = list(range(len(steps) * TOKENS))
    order.shuffle(free)
    state = rule.allocate(len(free))
    state.convolution.fill_(torch.nan)  # as slots that were used before
    state.recurrent.fill_(torch.nan)
    last, done = [-1 for _ in sequences], [0 for _ in sequences]
    found = torch.empty(len(steps), TOKENS, *expected.shape[1:])
    for step in zip_longest(*steps, fillvalue=()):
        runs, before = [], list(done)
        for sequence in sequences:
            for length in step[sequence]:
                runs.append(Run(length, last[sequence], free.pop()))
                last[sequence] = runs[-1].target
                done[sequence] += length
        spans = [slice(*ends) for ends in zip(before, done, strict=True)]
        taken = torch.cat(
            [operands[each, span] for each, span in zip(sequences, spans, strict=True)]
        )
        out = apply(rule, weights, split_operands(shape, taken), state, runs)
        parts = torch.split(out, [span.stop - span.start for span in spans])
        for sequence, span, part in zip(sequences, spans, parts, strict=True):
            found[sequence, span] = part
    assert_close = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
    assert_close(found.flatten(0, 1), expected)
    assert_close(state.recurrent[last], whole.recurrent)
    assert torch.equal(state.convolution[last], whole.convolution)


@torch.inference_mode()
def test_a_state_is_never_changed_in_place(make_rule: MakeRule) -> None:
    """Another request may continue from it: it is the state behind a shared prefix."""
    shape = SHAPES["plain"]
    rule, weights = make_rule(shape, torch.float32), make_weights(shape)
    state = rule.allocate(4)
    apply(rule, weights, split_operands(shape, make_operands(shape, 70)), state, [Run(70, -1, 2)])
    convolution, recurrent = state.convolution[2].clone(), state.recurrent[2].clone()
    runs = [Run(1, 2, 0), Run(66, 2, 3), Run(1, 2, 1)]
    apply(rule, weights, split_operands(shape, make_operands(shape, 68)), state, runs)
    assert torch.equal(state.convolution[2], convolution)
    assert torch.equal(state.recurrent[2], recurrent)


@torch.inference_mode()
def test_memory_of_a_slot_is_what_is_allocated(make_rule: MakeRule) -> None:
    """Otherwise the engine would plan more slots than fit."""
    for stored in (torch.float32, torch.bfloat16):
        rule = make_rule(SHAPES["odd sizes"], torch.bfloat16)
        state = rule.allocate(3, stored)
        assert state.recurrent.dtype == stored
        assert state.convolution.nbytes + state.recurrent.nbytes == 3 * rule.bytes_per_slot(stored)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_bfloat16_stays_within_its_rounding(make_rule: MakeRule, stored: torch.dtype) -> None:
    shape = SHAPES["plain"]
    torch.manual_seed(0)
    weights = make_weights(shape)
    operands = make_operands(shape, TOKENS, torch.bfloat16)
    exact = TorchDeltaRule(shape, torch.float32, CPU)
    inputs = split_operands(shape, operands.float())
    expected = apply(exact, weights, inputs, exact.allocate(1), [Run(TOKENS, -1, 0)])
    rule = make_rule(shape, torch.bfloat16)
    runs = [Run(100, -1, 0), *(Run(1, slot, slot + 1) for slot in range(TOKENS - 100))]
    state = rule.allocate(len(runs), stored)
    out = apply(rule, weights, split_operands(shape, operands), state, runs)
    assert out.dtype == torch.bfloat16
    error = (out.float() - expected).norm() / expected.norm()
    assert error < (0.005 if stored == torch.float32 else 0.02)


@torch.inference_mode()
def test_recorded_kernel_runs_on_the_segments_of_a_later_step() -> None:
    """A pass is recorded once: a replay must not advance the states of the recorded step."""
    if native is None:
        pytest.skip("the kernels were not built")
    shape = SHAPES["plain"]
    torch.manual_seed(0)
    rule, weights = NativeDeltaRule(native, shape, torch.float32), make_weights(shape)
    operands = make_operands(shape, 40)
    inputs = split_operands(shape, operands)
    state = rule.allocate(4)
    with native.recorded() as operations:
        apply(rule, weights, inputs, state, [Run(10, -1, 0), Run(30, 0, 1)])
    recorded = state.recurrent[:2].clone()

    runs = [Run(5, 1, 2), Run(3, -1, 3)]
    fresh = split_operands(shape, operands.clone()[:8])
    expected_state = DeltaState(state.convolution.clone(), state.recurrent.clone())
    expected = apply(rule, weights, fresh, expected_state, runs)
    empty = torch.zeros(0, dtype=torch.int64)
    batch = StepBatch(
        token_ids=empty,
        positions=empty,
        slots=torch.zeros(8, dtype=torch.int64),
        query_starts=empty.int(),
        context_lengths=empty.int(),
        block_tables=empty.int()[:, None],
        num_decodes=0,
        query_lengths_host=(),
        context_lengths_host=(),
        states=make_segments(runs),
    )
    recording = Recording(native)
    recording.replay((OperationCall * len(operations))(*operations), batch)
    assert torch.equal(inputs.out[:8], expected)
    assert torch.equal(state.recurrent[:2], recorded)
    assert torch.equal(state.recurrent, expected_state.recurrent)
