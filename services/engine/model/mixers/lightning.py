"""Lightning attention as a mixer: linear attention whose heads decay at fixed rates.

Source: https://arxiv.org/abs/2405.17381, as in MiniMax-01 (https://arxiv.org/abs/2501.08313).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.batch.step_batch import StateSegments
from services.engine.model.architecture.lightning_shape import LightningShape
from services.engine.model.mixers.chunked_scan import ScanTokens, scan
from services.engine.model.mixers.gated_norm import GatedNorm
from services.engine.model.mixers.recurrent import RecurrentMixer, RecurrentScratch
from services.engine.model.mixers.runs import RunGroups
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.rotation import Rotation

__all__ = ["LightningMixer", "LightningScratch", "LightningWeights"]


@dataclass(frozen=True, slots=True)
class LightningWeights:
    """Weights of one layer's lightning attention."""

    inputs: Projection
    """Product that computes query, key and value of each head, before their SiLU"""
    gate: Projection
    decays: Tensor
    """float32 [heads, 1, 1], logarithms of the decays"""
    norm: GatedNorm
    output: Projection


@dataclass(frozen=True, slots=True)
class LightningScratch(RecurrentScratch):
    """Outputs of the input projections."""

    inputs: Tensor
    """[tokens, 3 * outputs], head by head"""
    gate: Tensor
    """[tokens, outputs]"""
    out: Tensor
    arranged: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.inputs, self.gate, self.out, self.arranged


class LightningMixer(RecurrentMixer[LightningScratch]):
    """The lightning attention of layer `layer`, computed by torch."""

    def __init__(
        self,
        layer: int,
        shape: LightningShape,
        weights: LightningWeights,
        operators: Operators,
        groups: RunGroups,
    ) -> None:
        """groups: runs' groups, which all layers share."""
        super().__init__(layer, weights.output, operators)
        self.scratch_key = ("lightning", shape.outputs)
        self._shape = shape
        self._weights = weights
        self._groups = groups

    def allocate(self, tokens: int) -> LightningScratch:
        width = self._shape.outputs
        widths = (3 * width, width, width, width)
        return LightningScratch(*(self._operators.empty(tokens, each) for each in widths))

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Allocate the sums of keys and values: [slots, heads, head_dim, head_dim]."""
        shape = self._shape
        sizes = (slots, shape.heads, shape.head_dim, shape.head_dim)
        return (self._weights.decays.new_zeros(sizes, dtype=dtype),)

    def project(
        self, rows: Tensor, scratch: LightningScratch, rotations: Sequence[Rotation]
    ) -> None:
        self._weights.inputs.into(rows, scratch.inputs)
        self._weights.gate.into(rows, scratch.gate)

    def advance(
        self, scratch: LightningScratch, state: tuple[Tensor, ...], segments: StateSegments
    ) -> None:
        (states,), weights = state, self._weights
        out = torch.empty(scratch.out.shape, device=scratch.out.device)
        for runs in self._groups.of(segments):
            heads = functional.silu(scratch.inputs[runs.rows].float())
            heads = heads.view(*runs.rows.shape, self._shape.heads, -1).transpose(1, 2)
            queries, keys, values = heads.chunk(3, dim=-1)
            decays = weights.decays.expand(-1, runs.rows.shape[1], -1)
            tokens = ScanTokens(values, decays, opened=keys, closed=queries)
            after, rows = scan(runs.before(states).float(), tokens)
            states[runs.targets] = after.to(states.dtype)
            out[runs.rows] = rows.transpose(1, 2).flatten(2)
        scratch.out.copy_(weights.norm.apply(out, scratch.gate))
