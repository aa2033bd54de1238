"""Mirostat 2.0: keeps the surprise of what is drawn near a target.

Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity" (2020).
"""

import numpy as np

from services.engine.messages import MirostatSettings

__all__ = ["Mirostat"]

_FARTHEST = 1e30
"""Bits; keeps a target or learning rate beyond reason from ending in infinity"""


class Mirostat:
    """mu, the largest surprise that the next token may have. In bits."""

    __slots__ = ("_kept", "_settings", "mu")

    def __init__(self, settings: MirostatSettings, mu: float | None = None) -> None:
        """`mu` continues an earlier sequence; None = from the beginning, twice the target."""
        self._settings = settings
        self.mu = _rounded(2 * settings.target_surprise if mu is None else mu)
        self._kept = self.mu

    def observe(self, surprise: float) -> None:
        """A token was drawn, and this was -log2 of its probability before any were dropped."""
        settings = self._settings
        error = surprise - settings.target_surprise
        self.mu = _rounded(self.mu - settings.learning_rate * error)

    def keep(self) -> None:
        """What was observed belongs to the sequence."""
        self._kept = self.mu

    def roll_back(self) -> None:
        """Drop what was observed since the last `keep`: the token was not appended."""
        self.mu = self._kept


def _rounded(mu: float) -> float:
    """As the contract carries it, so that a sequence goes on elsewhere from the same number."""
    return float(np.float32(min(max(mu, -_FARTHEST), _FARTHEST)))
