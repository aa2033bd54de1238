"""Deltas: additions of adapters to the products of a step."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import Tensor

__all__ = ["Delta", "ExpertDeltas", "SequenceDelta", "TableDelta"]


class Delta(ABC):
    """Additions of adapters to one product, for some rows of a step."""

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """True if the present step has rows with an adapter."""

    @abstractmethod
    def add_to(self, rows: Tensor, out: Tensor) -> None:
        """Add to the product `out` [n, outputs] of `rows` [n, inputs], in the products' layout."""


class TableDelta(ABC):
    """Additions of adapters to the rows of an embedding, for some rows of a step."""

    @abstractmethod
    def add_rows(self, index: Tensor, out: Tensor) -> None:
        """Add to `out` [n, width] the adapters' additions to rows `index`, int64 [n]."""


class SequenceDelta(ABC):
    """Additions of adapters to a product whose rows are cached tokens of one sequence."""

    @abstractmethod
    def changes_for(self, number: int) -> bool:
        """Return whether the adapter of this number, 0 = none, changes the product."""

    @abstractmethod
    def add_for(self, number: int, rows: Tensor, out: Tensor) -> None:
        """Add an adapter's additions for all `rows` [n, inputs] to `out` [n, outputs]."""


class ExpertDeltas(ABC):
    """Additions of adapters to the products of a layer's experts."""

    gates: Sequence[Delta]
    """Additions to gate and up side by side, one for each expert"""
    downs: Sequence[Delta]

    @property
    @abstractmethod
    def is_active(self) -> bool:
        """True if the present step has rows with an adapter of these experts."""

    @abstractmethod
    def routed(self, index: Tensor) -> AbstractContextManager[None]:
        """Have `gates` and `downs` add to these rows of the step alone: int64 [n]."""
