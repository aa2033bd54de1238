"""Selective scan of Mamba on the CPU kernels."""

from ctypes import byref

import torch
from torch import Tensor

from services.engine.batch.step_batch import StateSegments
from services.engine.kernels.library import DTYPES, Native
from services.engine.kernels.memory import allocate
from services.engine.kernels.structures import SelectiveCall
from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.mixers.selective_scan import (
    SelectiveConstants,
    SelectiveInputs,
    SelectiveScan,
    SelectiveState,
)

__all__ = ["NativeSelectiveScan"]


class NativeSelectiveScan(SelectiveScan):
    """Convolution and scan in float32 and bfloat16 on any CPU, by one kernel each."""

    def __init__(self, native: Native, shape: SelectiveShape, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype, torch.device("cpu"))
        self._native = native

    def allocate(self, slots: int, dtype: torch.dtype = torch.float32) -> SelectiveState:
        last, states = self._sizes(slots)
        return SelectiveState(allocate(last, self._dtype), allocate(states, dtype))

    def convolve(
        self,
        constants: SelectiveConstants,
        mixed: Tensor,
        state: SelectiveState,
        segments: StateSegments,
        out: Tensor,
    ) -> None:
        call = self._call(constants, state, segments)
        call.mixed, call.mixed_stride = mixed.data_ptr(), mixed.stride(0)
        call.convolved = out.data_ptr()
        self._native.selective_convolve(byref(call))

    def apply(
        self,
        constants: SelectiveConstants,
        inputs: SelectiveInputs,
        state: SelectiveState,
        segments: StateSegments,
    ) -> None:
        call = self._call(constants, state, segments)
        call.gate, call.gate_stride = inputs.gate.data_ptr(), inputs.gate.stride(0)
        call.convolved, call.steps = inputs.convolved.data_ptr(), inputs.steps.data_ptr()
        call.opened, call.closed = inputs.opened.data_ptr(), inputs.closed.data_ptr()
        call.out = inputs.out.data_ptr()
        self._native.selective_scan(byref(call))

    def _call(
        self, constants: SelectiveConstants, state: SelectiveState, segments: StateSegments
    ) -> SelectiveCall:
        """Return a call that lacks the operands of tokens."""
        shape, bias = self._shape, constants.convolution_bias
        return SelectiveCall(
            convolution=constants.convolution.data_ptr(),
            convolution_bias=None if bias is None else bias.data_ptr(),
            rates=constants.rates.data_ptr(),
            step_bias=constants.step_bias.data_ptr(),
            skip=constants.skip.data_ptr(),
            windows=state.last.data_ptr(),
            states=state.states.data_ptr(),
            starts=segments.starts.data_ptr(),
            sources=segments.sources.data_ptr(),
            targets=segments.targets.data_ptr(),
            runs=len(segments.targets),
            channels=shape.channels,
            state_width=shape.state_width,
            conv_width=shape.conv_width,
            dtype=DTYPES[self._dtype],
            state_dtype=DTYPES[state.states.dtype],
        )
