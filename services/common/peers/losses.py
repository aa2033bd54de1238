"""Losses of services that one request survives."""

__all__ = ["MAX_LOSSES", "Losses"]

MAX_LOSSES = 3
"""Number of losses in a row, without progress between them, that ends a request"""


class Losses:
    """Count of the times in a row that a request lost its service without progress.

    The request itself may crash the services, and would then interrupt all other requests again.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._progress = 0

    def count(self, progress: int = 0) -> bool:
        """Count a loss. Return whether the request may be sent again.

        progress: amount that the request has received from all services so far, in any unit; it
        never falls.
        """
        if progress > self._progress:
            self._in_a_row = 0
        self._progress = progress
        self._in_a_row += 1
        return self._in_a_row < MAX_LOSSES
