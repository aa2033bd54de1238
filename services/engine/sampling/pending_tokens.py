"""Tokens that a device has drawn and that are still on their way to the host."""

from collections.abc import Sequence

from torch import Tensor

from services.engine.batch.transfer import HostCopy
from services.engine.sampling.row import Row
from services.engine.sampling.sampler import sample, try_sample

__all__ = ["PendingTokens"]


class PendingTokens:
    """One token per row, usable on the device before it reaches the host.

    A few draws need more candidates than the device looked at. For these rows the device's token is
    provisional: the host draws again, and what the device computed from a wrong token is void.
    """

    def __init__(self, logits: Tensor, rows: Sequence[Row] | None) -> None:
        """logits: float32 [rows, vocabulary]; rows: none with mirostat; None = plain greedy."""
        self._rows = rows
        self.on_device, is_settled = try_sample(logits, rows)
        self._settled = None if is_settled is None else HostCopy(is_settled)
        self._logits = logits if is_settled is None else logits.clone()
        self._copy = HostCopy(self.on_device)

    def wait(self) -> tuple[list[int], list[int]]:
        """Wait for the device. Return its provisional tokens, and the final ones."""
        provisional: list[int] = self._copy.wait().tolist()
        final = list(provisional)
        if self._rows is not None and self._settled is not None:
            settled = self._settled.wait()
            for i in (~settled).nonzero().squeeze(1).tolist():
                final[i] = sample(self._logits[i : i + 1], [self._rows[i]])[0]
        return provisional, final
