"""Gated delta rule on the CPU kernels."""

import torch

from services.engine.batch.step_batch import StateSegments
from services.engine.kernels.library import DTYPES, Kernel, Native
from services.engine.kernels.memory import allocate
from services.engine.kernels.structures import DeltaRuleCall
from services.engine.model.mixers.delta_rule import (
    DeltaInputs,
    DeltaRule,
    DeltaShape,
    DeltaState,
    DeltaWeights,
    OutputGate,
)

__all__ = ["NativeDeltaRule"]


class NativeDeltaRule(DeltaRule):
    """The rule in float32 and bfloat16 on any CPU, by one recordable kernel for all tokens."""

    def __init__(self, native: Native, shape: DeltaShape, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype, torch.device("cpu"))
        self._native = native

    def allocate(self, slots: int, dtype: torch.dtype = torch.float32) -> DeltaState:
        shape = self._shape
        return DeltaState(
            allocate((slots, shape.conv_width - 1, shape.channels), self._dtype),
            allocate((slots, shape.value_heads, shape.key_dim, shape.value_dim), dtype),
        )

    def apply(
        self,
        weights: DeltaWeights,
        inputs: DeltaInputs,
        state: DeltaState,
        segments: StateSegments,
    ) -> None:
        shape, bias = self._shape, weights.convolution_bias
        call = DeltaRuleCall(
            inputs.mixed.data_ptr(),
            inputs.gate.data_ptr(),
            inputs.beta.data_ptr(),
            inputs.decay.data_ptr(),
            inputs.out.data_ptr(),
            weights.convolution.data_ptr(),
            None if bias is None else bias.data_ptr(),
            weights.rates.data_ptr(),
            weights.decay_bias.data_ptr(),
            weights.norm.data_ptr(),
            state.convolution.data_ptr(),
            state.recurrent.data_ptr(),
            segments.starts.data_ptr(),
            segments.sources.data_ptr(),
            segments.targets.data_ptr(),
            len(segments.targets),
            inputs.mixed.stride(0),
            inputs.gate.stride(0),
            inputs.beta.stride(0),
            inputs.decay.stride(0),
            inputs.out.stride(0),
            shape.key_heads,
            shape.value_heads,
            shape.key_dim,
            shape.value_dim,
            shape.conv_width,
            shape.norm_epsilon,
            shape.least_decay,
            shape.gate is OutputGate.SILU,
            shape.decays_channels,
            shape.doubles_beta,
            DTYPES[self._dtype],
            DTYPES[state.recurrent.dtype],
        )
        self._native.run(Kernel.DELTA_RULE, call)
