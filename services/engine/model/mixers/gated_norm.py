"""Gate and norm of a recurrent layer's output."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.model.architecture.delta_shape import OutputGate
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.parts.shard import Shard
from services.engine.ranks.all_reduce import AllReduce

__all__ = ["GatedNorm", "NormRanks", "norm_ranks"]


@dataclass(frozen=True, slots=True)
class NormRanks:
    """Ranks among which outputs that are normed together are divided."""

    all_reduce: AllReduce
    group: int
    """Index of this rank's norm"""
    groups: int
    """Number of norms of all ranks"""


def norm_ranks(outputs: int, norm_width: int, shard: Shard) -> NormRanks | None:
    """Return the ranks among which a norm is divided; None: each rank has whole ones.

    outputs: number of all ranks' outputs; norm_width: number of outputs normed together; 0: none.
    """
    width = outputs // shard.count
    if not norm_width or width % norm_width == 0:
        return None
    group = shard.number * width // norm_width
    return NormRanks(shard.all_reduce, group, outputs // norm_width)


@dataclass(frozen=True, slots=True)
class GatedNorm:
    """RMSNorm over groups of outputs, before or after a function of the gate multiplies them."""

    weight: Tensor | None
    """float32 [outputs]; None: there is only the gate"""
    width: int
    """Number of outputs that are normed together, those of other ranks included"""
    epsilon: float
    norms_first: bool
    ranks: NormRanks | None
    """Ranks that share a norm; None: each rank has whole groups"""
    gate: OutputGate = OutputGate.SILU

    @staticmethod
    def of(shape: MambaShape, weight: Tensor | None, ranks: NormRanks | None) -> "GatedNorm":
        """Make the norm of a layer. shape: that of this rank."""
        return GatedNorm(weight, shape.norm_width, shape.norm_epsilon, shape.norms_first, ranks)

    def apply(self, rows: Tensor, gate: Tensor) -> Tensor:
        """Return float32 [n, outputs]. rows: float32 [n, outputs]; gate: [n, outputs]."""
        is_sigmoid = self.gate is OutputGate.SIGMOID
        factors = (torch.sigmoid if is_sigmoid else functional.silu)(gate.float())
        if self.weight is None:
            return rows * factors
        if self.norms_first:
            return self._normed(rows, self.weight) * factors
        return self._normed(rows * factors, self.weight)

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        if self.ranks is None:
            groups = rows.view(len(rows), -1, self.width)
            normed = functional.rms_norm(groups, (self.width,), eps=self.epsilon)
            return normed.flatten(1) * weight
        squares = torch.empty((len(rows), self.ranks.groups), device=rows.device)
        mine = self.ranks.all_reduce.operand(squares)
        mine.zero_()[:, self.ranks.group] = rows.square().sum(1)
        self.ranks.all_reduce.sum(mine, squares)
        mean = squares[:, self.ranks.group, None] / self.width
        return rows * torch.rsqrt(mean + self.epsilon) * weight
