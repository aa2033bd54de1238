"""Low-rank additions on a GPU, in launches that depend on no adapter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.model.operators.low_rank import (
    GRAPH_RANK,
    LowRank,
    LowRankProduct,
    RowGroups,
)
from services.engine.model.operators.low_rank_kernels import FIELDS, add_low_rank

__all__ = ["TritonLowRankProduct"]

_RANKS = 16
"""Divisor of the ranks for which a step reserves memory"""


class TritonLowRankProduct(LowRankProduct):
    """Low-rank additions of all rows and adapters by two launches.

    A table on the device has the addresses of all parts. Its own address changes only for an
    adapter with a larger number than was reserved.
    """

    def __init__(self, parts: int, widest: int, device: torch.device) -> None:
        """parts: most parts of an adapter; widest: most outputs of a part."""
        super().__init__()
        self._widest = widest
        self._table = torch.zeros((0, parts, FIELDS), dtype=torch.int64, device=device)
        self._rank = 0

    def reserve(self, most: int) -> None:
        known = len(self._table)
        if most >= known:
            table = self._table.new_zeros((most + 1, *self._table.shape[1:]))
            table[:known] = self._table
            self._table = table

    def change(self, number: int, parts: Sequence[LowRank]) -> None:
        super().change(number, parts)
        self.reserve(number)
        record = torch.zeros(self._table.shape[1:], dtype=torch.int64)
        for place, part in enumerate(parts):
            bias = 0 if part.bias is None else part.bias.data_ptr()
            addresses = (part.down.data_ptr(), part.up.data_ptr(), bias)
            rank, outputs = part.up.shape
            record[place] = torch.tensor((*addresses, rank, part.first, outputs))
        self._table[number] = record.to(self._table.device)
        ranks = (len(part.down) for each in self._parts.values() for part in each)
        self._rank = -(-max(ranks, default=0) // _RANKS) * _RANKS

    def add_to(self, rows: Tensor, out: Tensor, groups: RowGroups) -> None:
        if not self._widest:
            return  # no adapter can have a part
        assert groups.sorted is not None
        most_rank = GRAPH_RANK if groups.is_staged else self._rank
        add_low_rank(rows, out, groups.sorted, self._table, self._widest, most_rank)
