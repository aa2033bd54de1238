"""State space scan of Mamba-2 in torch, for every dtype and device."""

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.mixers.chunked_scan import ScanTokens, scan
from services.engine.model.mixers.mamba_scan import (
    MambaConstants,
    MambaInputs,
    MambaScan,
    MambaState,
)
from services.engine.model.mixers.runs import RunGroups, convolve

__all__ = ["TorchMambaScan"]


class TorchMambaScan(MambaScan):
    """Scan that computes runs of the same length together, and long runs in chunks."""

    def __init__(
        self, shape: MambaShape, dtype: torch.dtype, device: torch.device, groups: RunGroups
    ) -> None:
        """groups: runs' groups, which all layers share."""
        super().__init__(shape, dtype, device)
        self._groups = groups

    def allocate(self, slots: int, dtype: torch.dtype = torch.float32) -> MambaState:
        last, states = self._sizes(slots)
        return MambaState(
            torch.zeros(last, dtype=self._dtype, device=self._device),
            torch.zeros(states, dtype=dtype, device=self._device),
        )

    def apply(
        self,
        constants: MambaConstants,
        inputs: MambaInputs,
        state: MambaState,
        segments: StateSegments,
    ) -> None:
        out = torch.empty(inputs.gate.shape, device=self._device)
        factors, bias = constants.convolution, constants.convolution_bias
        for runs in self._groups.of(segments):
            mixed = convolve(inputs.mixed[runs.rows], state.last, runs, factors, bias)
            before, steps = runs.before(state.states).float(), inputs.steps[runs.rows]
            after, rows = _scan(self._shape, constants, functional.silu(mixed), steps, before)
            state.states[runs.targets] = after.to(state.states.dtype)
            out[runs.rows] = rows.flatten(2)
        inputs.out.copy_(constants.norm.apply(out, inputs.gate))


def _scan(
    shape: MambaShape, constants: MambaConstants, mixed: Tensor, steps: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states after runs of tokens, and the outputs. May overwrite `state`.

    With t = softplus(step + step_bias), the state S of a head becomes exp(-rate * t) * S + t * B
    x^T; the output is S^T C + skip * x.

    mixed: float32 [runs, length, channels], the convolution's output: x of all heads, B and C
    of all groups; steps: [runs, length, heads]; state: float32 [runs, heads, state_width,
    head_dim]. Outputs: float32 [runs, length, heads, head_dim].
    """
    runs, length, _ = mixed.shape
    inputs, opened, closed = torch.split(mixed, [shape.outputs, shape.factors, shape.factors], -1)
    heads = (shape.groups, shape.heads // shape.groups)
    values = inputs.view(runs, length, *heads, -1).permute(0, 2, 3, 1, 4)
    taken = functional.softplus(steps.float() + constants.step_bias)
    taken = taken.clamp(shape.least_step, shape.most_step)
    taken = taken.view(runs, length, *heads, 1).permute(0, 2, 3, 1, 4)
    tokens = ScanTokens(
        values * taken,
        -constants.rates.view(*heads, 1, 1) * taken,
        *(
            each.view(runs, length, *heads[:1], 1, -1).permute(0, 2, 3, 1, 4)
            for each in (opened, closed)
        ),
    )
    state, out = scan(state.view(runs, *heads, *state.shape[2:]), tokens)
    out = out + constants.skip.view(*heads, 1, 1) * values
    return state.flatten(1, 2), out.permute(0, 3, 1, 2, 4).flatten(2, 3)
