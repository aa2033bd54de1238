"""Tensor parallelism: what of every weight one rank holds, and where ranks add up or gather.

After Megatron (https://arxiv.org/abs/1909.08053): products that read the residual are cut by their
outputs, those that add to it by their inputs, so that a layer takes two sums over the ranks. The
residual, the norms and the embedding are the same on all of them.
"""

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from services.common.settings import StartupError
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.feed_forward import FeedForward
from services.engine.model.operators.interface import Operators, Projection

__all__ = ["WHOLE", "Shard"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` equal parts of a model. Of one, everything is what it was."""

    number: int = 0
    count: int = 1

    def of(self, spec: ModelSpec) -> ModelSpec:
        """The shape of this part. Raises StartupError when the model can't be cut so."""
        widths = {
            "num_attention_heads": spec.num_heads,
            "intermediate_size": spec.intermediate_size,
            "the experts' intermediate size": spec.experts.width if spec.experts else self.count,
        }
        for name, width in widths.items():
            if width % self.count:
                raise self._refusal(f"{name} ({width}) is not a multiple of {self.count}")
        heads = spec.num_kv_heads
        if heads % self.count and self.count % heads:
            raise self._refusal(f"num_key_value_heads ({heads}) neither divides it nor is divided")
        if not self.sizes(spec.vocab_size)[-1] > 0:
            raise self._refusal(f"vocab_size ({spec.vocab_size}) is too small")
        experts = spec.experts
        if experts is not None:
            experts = dataclasses.replace(experts, width=experts.width // self.count)
        return dataclasses.replace(
            spec,
            num_heads=spec.num_heads // self.count,
            num_kv_heads=max(1, heads // self.count),
            intermediate_size=spec.intermediate_size // self.count,
            experts=experts,
        )

    def of_heads(self, count: int) -> "Shard":
        """Which part of `count` key heads this rank has; where they are fewer, ranks share them."""
        sharers = max(1, self.count // count)
        return Shard(self.number // sharers, self.count // sharers)

    def rows(self, tensor: Tensor) -> Tensor:
        """This part of the outputs: the first dimension of a weight or a bias. A view."""
        return tensor.split_with_sizes(self.sizes(len(tensor)))[self.number]

    def columns(self, weight: Tensor) -> Tensor:
        """This part of the inputs. A view."""
        return weight.chunk(self.count, dim=1)[self.number]

    def once(self, bias: Tensor | None) -> Tensor | None:
        """A bias of what ranks add up, which only one of them may add."""
        return bias if self.number == 0 else None

    def summed(self, projection: Projection, operators: Operators) -> Projection:
        """A product that was cut by its inputs, added up."""
        return projection if self.count == 1 else _Summed(projection, operators)

    def summed_experts(self, experts: FeedForward) -> FeedForward:
        """Experts each of which was cut, added up once for all of them."""
        return experts if self.count == 1 else _SummedExperts(experts)

    def gathered(self, projection: Projection, operators: Operators) -> Projection:
        """A product that was cut by its outputs, whole on rank 0."""
        return projection if self.count == 1 else _Gathered(self, projection, operators)

    def normed_heads(
        self,
        qkv: Projection,
        query_norm: Tensor | None,
        key_norm: Tensor | None,
        epsilon: float,
        operators: Operators,
    ) -> tuple[Projection, Tensor | None, Tensor | None]:
        """Queries and keys that are normed over all heads, those of other ranks too.

        Returns the product that does so, and which norms are left to be done after it.
        """
        if self.count == 1 or query_norm is None or key_norm is None:
            return qkv, query_norm, key_norm
        norms = (query_norm, key_norm)
        return _NormedOverRanks(qkv, norms, self.count, epsilon, operators), None, None

    def sizes(self, width: int) -> list[int]:
        """How much of `width` each rank has: the last may have less."""
        most = -(-width // self.count)
        return [min(most, width - first) for first in range(0, most * self.count, most)]

    def _refusal(self, why: str) -> StartupError:
        return StartupError(
            f"The model can't be cut into {self.count} parts: {why}; choose another number of "
            "ranks (torchrun --nproc-per-node)."
        )


WHOLE = Shard()


class _Reworked(Projection):
    """A projection whose product ranks work on together before it is used."""

    def __init__(self, projection: Projection, operators: Operators) -> None:
        self._projection = projection
        self._operators = operators

    @property
    def weight_bytes(self) -> int:
        return self._projection.weight_bytes

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        product = self._operators.temporary(*out.shape)
        self.into(rows, product)
        out += product


class _Summed(_Reworked):
    def into(self, rows: Tensor, out: Tensor) -> None:
        self._projection.into(rows, out)
        dist.all_reduce(out)


class _Gathered(_Reworked):
    """Into float32 only."""

    def __init__(self, shard: Shard, projection: Projection, operators: Operators) -> None:
        super().__init__(projection, operators)
        self._shard = shard

    def into(self, rows: Tensor, out: Tensor) -> None:
        count, sizes = len(rows), self._shard.sizes(out.shape[1])
        # What one rank sends must be as large as what another does, and contiguous.
        mine = torch.empty(count * sizes[0], device=out.device)
        self._projection.into(rows, _first(mine, count, sizes[self._shard.number]))
        if self._shard.number:
            dist.gather(mine)
            return
        everybodys = [torch.empty_like(mine) for _ in sizes]
        dist.gather(mine, everybodys)
        for part, size, place in zip(
            everybodys, sizes, out.split_with_sizes(sizes, dim=1), strict=True
        ):
            place.copy_(_first(part, count, size))


class _NormedOverRanks(_Reworked):
    """Queries and keys pass an RMSNorm over all heads of all ranks."""

    def __init__(
        self,
        projection: Projection,
        norms: tuple[Tensor, Tensor],
        ranks: int,
        epsilon: float,
        operators: Operators,
    ) -> None:
        super().__init__(projection, operators)
        self._norms = norms
        self._epsilon = epsilon
        # Key heads that ranks share are counted as often in this as in the sum.
        self._widths = [ranks * len(norm) for norm in norms]

    def into(self, rows: Tensor, out: Tensor) -> None:
        self._projection.into(rows, out)
        queries, keys = (len(norm) for norm in self._norms)
        parts = (out[:, :queries], out[:, queries : queries + keys])
        squares = torch.stack([part.float().square().sum(dim=1) for part in parts])
        dist.all_reduce(squares)
        for part, norm, square, width in zip(
            parts, self._norms, squares, self._widths, strict=True
        ):
            scale = torch.rsqrt(square / width + self._epsilon)
            part.copy_((part.float() * scale[:, None]).to(norm.dtype) * norm)


@dataclass(frozen=True, slots=True)
class _SummedExperts(FeedForward):
    experts: FeedForward

    def add_to(self, rows: Tensor, out: Tensor, inner: Tensor) -> None:
        part = torch.zeros(out.shape, device=out.device)
        self.experts.add_to(rows, part, inner)
        dist.all_reduce(part)
        out += part


def _first(flat: Tensor, rows: int, width: int) -> Tensor:
    """[rows, width] in the first of its elements."""
    return flat[: rows * width].view(rows, width)
