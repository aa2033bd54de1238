"""Mirostat 2.0: sampling that holds the surprise of drawn tokens near a target.

Basu et al., "Mirostat: a neural text decoding algorithm that directly controls perplexity" (2020).
"""

import numpy as np

from services.engine.checked_request import MirostatSettings

__all__ = ["Mirostat"]

_LARGEST = 1e30
"""Largest |mu| in bits: extreme targets and learning rates must not produce infinity"""


class Mirostat:
    """One sequence's state: mu, the largest surprise of the next token, in bits."""

    __slots__ = ("_committed", "_settings", "mu")

    def __init__(self, settings: MirostatSettings, mu: float | None = None) -> None:
        """mu: state of the sequence that this one resumes; None = twice the target."""
        self._settings = settings
        self.mu = _rounded(2 * settings.target_surprise if mu is None else mu)
        self._committed = self.mu

    def observe(self, surprise: float) -> None:
        """Update mu after a draw. surprise: -log2 of the token's untruncated probability."""
        settings = self._settings
        error = surprise - settings.target_surprise
        self.mu = _rounded(self.mu - settings.learning_rate * error)

    def commit(self) -> None:
        """Make the observations permanent: their tokens were appended."""
        self._committed = self.mu

    def roll_back(self) -> None:
        """Undo the observations since the last `commit`: their tokens were not appended."""
        self.mu = self._committed


def _rounded(mu: float) -> float:
    """Round to float32, the type in messages: a resumed sequence has exactly the same mu."""
    return float(np.float32(min(max(mu, -_LARGEST), _LARGEST)))
