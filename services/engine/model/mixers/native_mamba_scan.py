"""State space scan of Mamba-2 on the CPU kernels."""

import torch

from services.engine.batch.step_batch import StateSegments
from services.engine.kernels.library import DTYPES, Kernel, Native
from services.engine.kernels.memory import allocate
from services.engine.kernels.structures import StateScanCall
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.mixers.mamba_scan import (
    MambaConstants,
    MambaInputs,
    MambaScan,
    MambaState,
)

__all__ = ["NativeMambaScan"]


class NativeMambaScan(MambaScan):
    """The scan in float32 and bfloat16 on any CPU, by one recordable kernel for all tokens."""

    def __init__(self, native: Native, shape: MambaShape, dtype: torch.dtype) -> None:
        super().__init__(shape, dtype, torch.device("cpu"))
        self._native = native

    def allocate(self, slots: int, dtype: torch.dtype = torch.float32) -> MambaState:
        last, states = self._sizes(slots)
        return MambaState(allocate(last, self._dtype), allocate(states, dtype))

    def apply(
        self,
        constants: MambaConstants,
        inputs: MambaInputs,
        state: MambaState,
        segments: StateSegments,
    ) -> None:
        shape, norm, bias = self._shape, constants.norm, constants.convolution_bias
        is_whole = norm.ranks is None
        call = StateScanCall(
            inputs.gate.data_ptr(),
            inputs.mixed.data_ptr(),
            inputs.steps.data_ptr(),
            inputs.out.data_ptr() if is_whole else None,
            inputs.convolved.data_ptr(),
            inputs.scanned.data_ptr(),
            constants.convolution.data_ptr(),
            None if bias is None else bias.data_ptr(),
            constants.rates.data_ptr(),
            constants.step_bias.data_ptr(),
            constants.skip.data_ptr(),
            None if norm.weight is None else norm.weight.data_ptr(),
            state.last.data_ptr(),
            state.states.data_ptr(),
            segments.starts.data_ptr(),
            segments.sources.data_ptr(),
            segments.targets.data_ptr(),
            len(segments.targets),
            inputs.gate.stride(0),
            inputs.mixed.stride(0),
            inputs.steps.stride(0),
            inputs.out.stride(0),
            shape.heads,
            shape.head_dim,
            shape.groups,
            shape.state_width,
            shape.conv_width,
            shape.norm_width,
            shape.norm_epsilon,
            shape.least_step,
            shape.most_step,
            shape.norms_first,
            DTYPES[self._dtype],
            DTYPES[state.states.dtype],
        )
        self._native.run(Kernel.STATE_SCAN, call)
        if not is_whole:
            inputs.out.copy_(norm.apply(inputs.scanned, inputs.gate))
