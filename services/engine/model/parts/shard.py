"""Tensor parallelism: each rank's part of every weight, and the collectives that combine them.

As in Megatron (https://arxiv.org/abs/1909.08053), weights that read the residual are split by
outputs and weights that add to it by inputs, so a layer needs two all-reduces. All ranks hold the
same residual, norms and embedding.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.settings import StartupError
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.quantized import QuantizedWeight, Weight, decoded, split
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.parts.feed_forward import FeedForward
from services.engine.ranks.all_reduce import AllReduce

__all__ = ["Shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of the `count` equal parts of a model. One part is the whole model."""

    number: int = 0
    count: int = 1
    all_reduce: AllReduce = field(default_factory=AllReduce, compare=False)

    def of(self, spec: ModelSpec) -> ModelSpec:
        """Return the shape of this part. Raises StartupError if `count` can't divide the model."""
        if not self.sizes(spec.vocab_size)[-1] > 0:
            raise self._refusal(f"vocab_size ({spec.vocab_size}) is too small")
        try:
            layers = tuple(layer.part(self.count) for layer in spec.layers)
        except ValueError as error:
            raise self._refusal(str(error)) from None
        return dataclasses.replace(spec, layers=layers)

    def of_heads(self, count: int) -> "Shard":
        """Return this rank's part of `count` key heads; several ranks share a head if they must."""
        sharers = max(1, self.count // count)
        return Shard(self.number // sharers, self.count // sharers)

    def rows(self, tensor: Tensor) -> Tensor:
        """View this part of the outputs: the first dimension of a weight or a bias."""
        return tensor.split_with_sizes(self.sizes(len(tensor)))[self.number]

    def outputs(self, weight: Weight) -> Weight:
        """View this part of the outputs of a weight that may be quantized."""
        return split(weight, self.sizes(weight.shape[0]))[self.number]

    def columns(self, weight: Weight) -> Weight:
        """View this part of the inputs of `weight` [outputs, inputs], decoded if a group is cut.

        Raises StartupError if a block of a mapped weight is cut.
        """
        if not isinstance(weight, Tensor):
            part = weight.columns(self.number, self.count)
            if part is not None:
                return part
            if isinstance(weight, QuantizedWeight) and weight.is_mapped and weight.order is None:
                raise StartupError(
                    f"--weights mapped can't divide a tensor of {weight.shape[1]} inputs into "
                    f"{self.count} parts: a block would be cut. Start with --weights full, or "
                    "choose another number of ranks (torchrun --nproc-per-node)."
                )
        return decoded(weight).chunk(self.count, dim=1)[self.number]

    def first_rank_only(self, bias: Tensor | None) -> Tensor | None:
        """Return `bias` on rank 0 and None on others, because the ranks' products are summed."""
        return bias if self.number == 0 else None

    def summed(self, projection: Projection, operators: Operators) -> Projection:
        """Sum over the ranks a product that is split by inputs."""
        if self.count == 1:
            return projection
        return _ReducedProjection(projection, operators, self.all_reduce)

    def summed_experts(self, experts: FeedForward) -> FeedForward:
        """Sum over the ranks the total of experts that are split by inputs."""
        return experts if self.count == 1 else _ReducedExperts(experts, self.all_reduce)

    def gathered(self, projection: Projection, operators: Operators) -> Projection:
        """Gather on rank 0 a product that is split by outputs."""
        return projection if self.count == 1 else _GatheredProjection(self, projection, operators)

    def normed_heads(
        self,
        qkv: Projection,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        epsilon: float,
        operators: Operators,
    ) -> tuple[Projection, Tensor | None, Tensor | None]:
        """Norm queries and keys over the heads of all ranks.

        Returns the product, normed if there are several ranks, and the norms still to be applied.
        """
        if self.count == 1 or query_norm is None or key_norm is None:
            return qkv, query_norm, key_norm
        norms = (query_norm, key_norm)
        normed = _NormedHeadsProjection(qkv, norms, self.count, epsilon, operators, self.all_reduce)
        return normed, None, None

    def sizes(self, width: int) -> list[int]:
        """Return each rank's part of `width`; the last may be smaller."""
        most = -(-width // self.count)
        return [min(most, width - first) for first in range(0, most * self.count, most)]

    def _refusal(self, why: str) -> StartupError:
        return StartupError(
            f"The model can't be divided into {self.count} parts: {why}. Choose another number of "
            "ranks (torchrun --nproc-per-node)."
        )


class _CollectiveProjection(Projection):
    """A projection with a collective operation on its output."""

    def __init__(self, projection: Projection, operators: Operators) -> None:
        self._projection = projection
        self._operators = operators
        self.weight_bytes = projection.weight_bytes

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        product = self._operators.temporary(*out.shape)
        self.into(rows, product)
        out += product


class _ReducedProjection(_CollectiveProjection):
    """A projection split by inputs, summed over the ranks."""

    def __init__(self, projection: Projection, operators: Operators, all_reduce: AllReduce) -> None:
        super().__init__(projection, operators)
        self._all_reduce = all_reduce

    def into(self, rows: Tensor, out: Tensor) -> None:
        part = self._all_reduce.operand(out)
        self._projection.into(rows, part)
        self._all_reduce.sum(part, out)


class _GatheredProjection(_CollectiveProjection):
    """A projection split by outputs, gathered on rank 0. Its output is float32."""

    def __init__(self, shard: Shard, projection: Projection, operators: Operators) -> None:
        super().__init__(projection, operators)
        self._shard = shard

    def into(self, rows: Tensor, out: Tensor) -> None:
        count, sizes = len(rows), self._shard.sizes(out.shape[1])
        # gather needs contiguous tensors of one size on all ranks.
        mine = torch.empty(count * sizes[0], device=out.device)
        self._projection.into(rows, _first(mine, count, sizes[self._shard.number]))
        if self._shard.number:
            dist.gather(mine)
            return
        parts = [torch.empty_like(mine) for _ in sizes]
        dist.gather(mine, parts)
        for part, size, place in zip(parts, sizes, out.split_with_sizes(sizes, dim=1), strict=True):
            place.copy_(_first(part, count, size))


class _NormedHeadsProjection(_CollectiveProjection):
    """A QKV projection with an RMSNorm of queries and of keys over the heads of all ranks."""

    def __init__(
        self,
        projection: Projection,
        norms: tuple[Tensor, Tensor],
        ranks: int,
        epsilon: float,
        operators: Operators,
        all_reduce: AllReduce,
    ) -> None:
        super().__init__(projection, operators)
        self._norms = norms
        self._epsilon = epsilon
        self._all_reduce = all_reduce
        # A key head that several ranks share counts as often here as in the sum of squares.
        self._widths = [ranks * len(norm) for norm in norms]

    def into(self, rows: Tensor, out: Tensor) -> None:
        self._projection.into(rows, out)
        queries, keys = (len(norm) for norm in self._norms)
        parts = (out[:, :queries], out[:, queries : queries + keys])
        squares = torch.empty((len(parts), len(rows)), device=rows.device)
        mine = self._all_reduce.operand(squares)
        for part, sums in zip(parts, mine, strict=True):
            torch.sum(part.float().square(), dim=1, out=sums)
        self._all_reduce.sum(mine, squares)
        for part, norm, square, width in zip(
            parts, self._norms, squares, self._widths, strict=True
        ):
            scale = torch.rsqrt(square / width + self._epsilon)
            part.copy_((part.float() * scale[:, None]).to(norm.dtype) * norm)


@dataclass(frozen=True, slots=True)
class _ReducedExperts(FeedForward):
    experts: FeedForward
    all_reduce: AllReduce

    @property
    def num_spares(self) -> int:
        return self.experts.num_spares

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor, spares: Sequence[Tensor]) -> None:
        total = torch.empty(out.shape, device=out.device)
        part = self.all_reduce.operand(total).zero_()
        self.experts.add_to(rows, part, inner, spares)
        self.all_reduce.sum(part, total)
        out += total


def _first(flat: Tensor, rows: int, width: int) -> Tensor:
    """View the first elements of `flat` as [rows, width]."""
    return flat[: rows * width].view(rows, width)
