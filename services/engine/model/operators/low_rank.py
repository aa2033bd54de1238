"""Low-rank additions to a product, different for each group of rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["LowRank", "LowRankProduct", "RowGroup", "RowGroups", "TorchLowRankProduct"]


@dataclass(frozen=True, slots=True)
class LowRank:
    """Addition of one adapter to some neighbouring outputs of a product."""

    down: Tensor
    """[rank, inputs]"""
    bias: Tensor | None
    """[rank], added to the product with `down`"""
    up: Tensor
    """[rank, outputs]"""
    first: int
    """Number of the first output"""

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows that have one adapter."""

    number: int
    """Number of the adapter, from 1"""
    index: Tensor | None
    """int64 [n]; None = all rows"""


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The rows of a product by adapter."""

    groups: tuple[RowGroup, ...]
    owners: Tensor
    """int32 [rows] on the host: the number of each row's adapter, 0 = none"""


class LowRankProduct(ABC):
    """Additions of all adapters to one product."""

    @abstractmethod
    def add_to(self, rows: Tensor, out: Tensor, groups: RowGroups) -> None:
        """Add up.T @ (down @ row + bias) of each row's adapter to its row of `out`.

        rows: [n, inputs], in the layout of products; out: [n, outputs].
        """


class TorchLowRankProduct(LowRankProduct):
    """Two products in torch for each adapter and part."""

    def __init__(
        self,
        parts: Mapping[int, Sequence[LowRank]],
        gather: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """parts: parts by number of the adapter; gather: function that copies some rows."""
        self._parts = parts
        self._gather = gather

    def add_to(self, rows: Tensor, out: Tensor, groups: RowGroups) -> None:
        for group in groups.groups:
            index = group.index
            parts = self._parts.get(group.number, ())
            some = rows if index is None or not parts else self._gather(rows, index)
            for part in parts:
                low = some @ part.down.T
                if part.bias is not None:
                    low += part.bias
                target = out[:, part.first : part.first + part.up.shape[1]]
                added = (low @ part.up).to(out.dtype)
                if index is None:
                    target += added
                else:
                    target.index_add_(0, index, added)
