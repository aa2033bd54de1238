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

    def __init__(self, native: Native, plain: Callable[[Tensor], Tensor]) -> None:
        """plain: function that returns rows row by row."""
        super().__init__()
        self._native = native
        self._plain = plain
        self._calls: _Calls | None = None
        """Calls of the present parts; None = no pass has needed them yet"""

    def change(self, number: int, parts: Sequence[LowRank]) -> None:
        super().change(number, parts)
        self._calls = None

    def add_to(self, rows: Tensor, out: Tensor, groups: RowGroups) -> None:
        plain = self._plain(rows)
        if out.dtype != plain.dtype:  # the scores of a router
            added = torch.zeros_like(out, dtype=plain.dtype)
            self.add_to(rows, added, groups)
            out += added
            return
        if self._calls is None:
            self._calls = _Calls(self._parts)
        calls = self._calls
        call = AdaptCall(
            rows=plain.data_ptr(),
            out=out.data_ptr(),
            owners=groups.owners.data_ptr(),
            parts=calls.parts,
            starts=calls.starts.data_ptr(),
            num_rows=len(plain),
            inputs=plain.shape[1],
            outputs=out.shape[1],
            out_stride=out.stride(0),
            most_rank=calls.rank,
            num_numbers=calls.count,
            dtype=DTYPES[plain.dtype],
        )
        self._native.adapt(byref(call))


class _Calls:
    """Parts of all adapters, as the kernel reads them."""

    def __init__(self, parts: Mapping[int, Sequence[LowRank]]) -> None:
        by_number = [parts.get(number, ()) for number in range(max(parts, default=0) + 1)]
        flat = [part for each in by_number for part in each]
        self._held = flat  # the memory that the calls point to
        self.starts = torch.tensor(
            [0, *accumulate(len(each) for each in by_number)], dtype=torch.int32
        )
        self.parts = (LowRankCall * len(flat))(*map(_call, flat))
        self.count = len(by_number)
        self.rank = max((sum(len(p.down) for p in each) for each in by_number), default=0)


def _call(part: LowRank) -> LowRankCall:
    rank, outputs = part.up.shape
    bias = None if part.bias is None else part.bias.data_ptr()
    return LowRankCall(part.down.data_ptr(), bias, part.up.data_ptr(), rank, part.first, outputs)
