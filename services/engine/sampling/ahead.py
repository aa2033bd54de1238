"""Tokens that are drawn on a device and used there, before they come to the host."""

from collections.abc import Sequence

from torch import Tensor

from services.engine.batch.transfer import Fetch
from services.engine.sampling.draw import sample, try_sample
from services.engine.sampling.row import Row

__all__ = ["Ahead"]


class Ahead:
    """One token per row, on its way to the host.

    Few draws need more candidates than the device looked at. What the device took for their token
    is then a guess, and what it computed from it is void.
    """

    def __init__(self, logits: Tensor, rows: Sequence[Row] | None) -> None:
        """logits: float32 [rows, vocabulary]; rows: without mirostat, None = all plainly greedy."""
        self._rows = rows
        self.taken, is_settled = try_sample(logits, rows)
        self._settled = None if is_settled is None else Fetch(is_settled)
        self._logits = logits if is_settled is None else logits.clone()
        self._fetch = Fetch(self.taken)

    def wait(self) -> tuple[list[int], list[int]]:
        """What the device took, and what is drawn: the same, but where it had to guess."""
        taken: list[int] = self._fetch.wait().tolist()
        drawn = list(taken)
        if self._rows is not None and self._settled is not None:
            settled = self._settled.wait()
            for i in (~settled).nonzero().squeeze(1).tolist():
                drawn[i] = sample(self._logits[i : i + 1], [self._rows[i]])[0]
        return taken, drawn
