"""Projections that consist of others: with adapters, with a norm, or one after the other."""

from dataclasses import dataclass

from torch import Tensor

from services.engine.model.operators.deltas import Delta
from services.engine.model.operators.interface import Operators, Projection

__all__ = ["AdaptedProjection", "ChainedProjection", "NormedProjection", "OutputNorm"]


class AdaptedProjection(Projection):
    """A projection and the additions of adapters. A step without adapters costs one test."""

    def __init__(self, base: Projection, delta: Delta) -> None:
        self.base = base
        self._delta = delta
        self.weight_bytes = base.weight_bytes

    @property
    def is_adapted(self) -> bool:
        return self._delta.is_active

    def into(self, rows: Tensor, out: Tensor) -> None:
        self.base.into(rows, out)
        if self.is_adapted:
            self._delta.add_to(rows, out)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        self.base.add_to(rows, out)
        if self.is_adapted:
            self._delta.add_to(rows, out)


@dataclass(frozen=True, slots=True)
class OutputNorm:
    """RMSNorm of the output that a part of a layer adds to the residual."""

    weight: Tensor
    epsilon: float
    operators: Operators

    def add(self, output: Tensor, hidden: Tensor) -> None:
        """Add the norm of `output` to the residual; both [n, hidden_size], row by row.

        May overwrite `output`.
        """
        self.operators.add_rms_norm(output, self.weight, self.epsilon, hidden)


class NormedProjection(Projection):
    """A projection followed by an RMSNorm."""

    def __init__(self, projection: Projection, norm: OutputNorm) -> None:
        self._projection = projection
        self._norm = norm
        self.weight_bytes = projection.weight_bytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        self.add_to(rows, out.zero_())

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        product = self._norm.operators.temporary(*out.shape)
        self._projection.into(rows, product)
        self._norm.add(product, out)


class ChainedProjection(Projection):
    """A product of another product's outputs."""

    def __init__(
        self, first: Projection, second: Projection, width: int, operators: Operators
    ) -> None:
        """width: number of outputs of `first`."""
        self._first = first
        self._second = second
        self._width = width
        self._operators = operators
        self.weight_bytes = first.weight_bytes + second.weight_bytes

    def into(self, rows: Tensor, out: Tensor) -> None:
        self._second.into(self._between(rows), out)

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        self._second.add_to(self._between(rows), out)

    def _between(self, rows: Tensor) -> Tensor:
        product, arranged = (self._operators.temporary(len(rows), self._width) for _ in range(2))
        self._first.into(rows, product)
        self._operators.arrange(product, arranged)
        return arranged
