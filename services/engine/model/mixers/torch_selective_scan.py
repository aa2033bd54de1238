"""Selective scan of Mamba in torch, for every dtype and device."""

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.mixers.runs import RunGroups, convolve
from services.engine.model.mixers.selective_scan import (
    SelectiveConstants,
    SelectiveInputs,
    SelectiveScan,
    SelectiveState,
)

__all__ = ["TorchSelectiveScan"]

_CHUNK = 32
"""Number of tokens of a run whose states are computed together"""
_ROWS = 256
"""Number of tokens of all runs whose states are in memory at once"""


class TorchSelectiveScan(SelectiveScan):
    """Scan that computes runs of the same length together, and long runs in chunks."""

    def __init__(
        self, shape: SelectiveShape, dtype: torch.dtype, device: torch.device, groups: RunGroups
    ) -> None:
        """groups: runs' groups, which all layers share."""
        super().__init__(shape, dtype, device)
        self._groups = groups

    def allocate(self, slots: int, dtype: torch.dtype = torch.float32) -> SelectiveState:
        last, states = self._sizes(slots)
        return SelectiveState(
            torch.zeros(last, dtype=self._dtype, device=self._device),
            torch.zeros(states, dtype=dtype, device=self._device),
        )

    def convolve(
        self,
        constants: SelectiveConstants,
        mixed: Tensor,
        state: SelectiveState,
        segments: StateSegments,
        out: Tensor,
    ) -> None:
        factors, bias = constants.convolution, constants.convolution_bias
        for runs in self._groups.of(segments):
            convolved = convolve(mixed[runs.rows], state.last, runs, factors, bias)
            out[runs.rows] = functional.silu(convolved).to(out.dtype)

    def apply(
        self,
        constants: SelectiveConstants,
        inputs: SelectiveInputs,
        state: SelectiveState,
        segments: StateSegments,
    ) -> None:
        for runs in self._groups.of(segments):
            before = runs.before(state.states).float()
            count = max(1, min(_CHUNK, _ROWS // len(runs.rows)))
            for rows in torch.split(runs.rows, count, 1):
                before, out = _advance(constants, inputs, rows, before)
                inputs.out[rows] = out.to(inputs.out.dtype)
            state.states[runs.targets] = before.to(state.states.dtype)


def _advance(
    constants: SelectiveConstants, inputs: SelectiveInputs, rows: Tensor, before: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the states after some tokens of runs, and the tokens' outputs.

    rows: int64 [runs, length]; before: float32 [runs, state_width, channels]. Outputs: float32
    [runs, length, channels].
    """
    steps = functional.softplus(inputs.steps[rows].float() + constants.step_bias)
    values = inputs.convolved[rows].float()
    decays = torch.exp(-constants.rates * steps.unsqueeze(2))
    added = inputs.opened[rows].unsqueeze(3) * (steps * values).unsqueeze(2)
    states = _states(decays, added, before)
    out = torch.einsum("rls,rlsc->rlc", inputs.closed[rows], states)
    out = (out + constants.skip * values) * functional.silu(inputs.gate[rows].float())
    return states[:, -1], out


def _states(decays: Tensor, added: Tensor, before: Tensor) -> Tensor:
    """Return the states after each token: S = decay * S + added. May overwrite the operands.

    Each round doubles the tokens that a state and a decay stand for
    (https://doi.org/10.1145/7902.7903). No decay exceeds 1, so nothing overflows.

    decays, added: float32 [runs, length, ...]; before: [runs, ...].
    """
    length, reach = decays.shape[1], 1
    while reach < length:
        added[:, reach:] += decays[:, reach:] * added[:, :-reach]
        decays[:, reach:] = decays[:, reach:] * decays[:, :-reach]
        reach *= 2
    return added.addcmul_(decays, before.unsqueeze(1))
