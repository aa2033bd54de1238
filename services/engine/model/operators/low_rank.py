"""Low-rank additions to a product, different for each group of rows."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = [
    "GRAPH_RANK",
    "LowRank",
    "LowRankProduct",
    "RowGroup",
    "RowGroups",
    "SortedRows",
    "TorchLowRankProduct",
]

GRAPH_RANK = 256
"""Largest rank of an adapter whose steps are CUDA graphs"""


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
class SortedRows:
    """The rows of a product in the order of their adapters, on the device.

    Neighbours in this order have few adapters, so a program that computes several rows reads the
    weights of few.
    """

    numbers: Tensor
    """int32 [rows], ascending: the number of each row's adapter, 0 = none"""
    rows: Tensor
    """int64 [rows], the row at each place of the order"""

    @staticmethod
    def of(numbers: Tensor) -> "SortedRows":
        """Sort rows. numbers: int32 [rows], the number of each row's adapter."""
        return SortedRows(*numbers.sort(stable=True))


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The rows of a product by adapter."""

    groups: tuple[RowGroup, ...]
    owners: Tensor
    """int32 [rows] on the host: the number of each row's adapter, 0 = none"""
    sorted: "SortedRows | None" = None
    """The rows on the device, for operators that find those of adapters there; None = others"""
    is_staged: bool = False
    """True if `sorted` alone says which rows have adapters, as in CUDA graphs. `groups` and
    `owners` are then empty"""


class LowRankProduct(ABC):
    """Additions of all adapters to one product."""

    def __init__(self) -> None:
        self._parts: dict[int, Sequence[LowRank]] = {}
        """Parts by number of the adapter; adapters without a part are missing"""

    def reserve(self, most: int) -> None:  # noqa: B027
        """Reserve memory, whose address graphs may hold, for adapters with numbers up to `most`."""

    def change(self, number: int, parts: Sequence[LowRank]) -> None:
        """Replace the parts of an adapter; none remove it."""
        if parts:
            self._parts[number] = parts
        else:
            self._parts.pop(number, None)

    @abstractmethod
    def add_to(self, rows: Tensor, out: Tensor, groups: RowGroups) -> None:
        """Add up.T @ (down @ row + bias) of each row's adapter to its row of `out`.

        rows: [n, inputs], in the layout of products; out: [n, outputs].
        """


class TorchLowRankProduct(LowRankProduct):
    """Two products in torch for each adapter and part."""

    def __init__(self, gather: Callable[[Tensor, Tensor], Tensor]) -> None:
        """gather: function that copies some rows."""
        super().__init__()
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
