"""Low-rank additions by the portable CPU kernel."""

from collections.abc import Callable, Mapping, Sequence
from ctypes import byref
from itertools import accumulate

import torch
from torch import Tensor

from services.engine.kernels.library import DTYPES, Native
from services.engine.kernels.structures import AdaptCall, LowRankCall
from services.engine.model.operators.low_rank import LowRank, LowRankProduct, RowGroups

__all__ = ["NativeLowRankProduct"]


class NativeLowRankProduct(LowRankProduct):
    """Low-rank additions of all rows and adapters by one call."""

    def __init__(
        self,
        native: Native,
        parts: Mapping[int, Sequence[LowRank]],
        plain: Callable[[Tensor], Tensor],
    ) -> None:
        """parts: parts by number of the adapter; plain: function that returns rows row by row."""
        self._native = native
        self._plain = plain
        by_number = [parts.get(number, ()) for number in range(max(parts, default=0) + 1)]
        flat = [part for each in by_number for part in each]
        self._held = flat  # the memory that the calls point to
        self._starts = torch.tensor(
            [0, *accumulate(len(each) for each in by_number)], dtype=torch.int32
        )
        self._parts = (LowRankCall * len(flat))(*map(_call, flat))
        self._numbers = len(by_number)
        self._rank = max((sum(len(p.down) for p in each) for each in by_number), default=0)

    def add_to(self, rows: Tensor, out: Tensor, groups: RowGroups) -> None:
        plain = self._plain(rows)
        if out.dtype != plain.dtype:  # the scores of a router
            added = torch.zeros_like(out, dtype=plain.dtype)
            self.add_to(rows, added, groups)
            out += added
            return
        call = AdaptCall(
            rows=plain.data_ptr(),
            out=out.data_ptr(),
            owners=groups.owners.data_ptr(),
            parts=self._parts,
            starts=self._starts.data_ptr(),
            num_rows=len(plain),
            inputs=plain.shape[1],
            outputs=out.shape[1],
            out_stride=out.stride(0),
            most_rank=self._rank,
            num_numbers=self._numbers,
            dtype=DTYPES[plain.dtype],
        )
        self._native.adapt(byref(call))


def _call(part: LowRank) -> LowRankCall:
    rank, outputs = part.up.shape
    bias = None if part.bias is None else part.bias.data_ptr()
    return LowRankCall(part.down.data_ptr(), bias, part.up.data_ptr(), rank, part.first, outputs)
