"""Parameters for drawing one token from one row of logits."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.checked_request import SamplingSettings
from services.engine.sampling.mirostat import Mirostat
from services.engine.sampling.penalties import Penalties

__all__ = ["NOTHING_ALLOWED", "Row", "uniform"]

NOTHING_ALLOWED = -2
"""Value in place of the drawn id of a row whose limits exclude every id"""


@dataclass(frozen=True, slots=True)
class Row:
    """Parameters and state that decide which token is drawn from one row."""

    settings: SamplingSettings
    choice: int
    position: int
    """Index of the token among the generated tokens, from the end of the original prompt"""
    banned: Sequence[int] = ()
    """Ids that are drawn only if no other id is left"""
    mask: bytes | None = None
    """Mask whose bit i, lowest first, allows id i; missing bits are 0; None = every id"""
    penalties: Penalties | None = None
    """Penalties from the tokens so far; None = the request has no penalties"""
    mirostat: Mirostat | None = None
    """Mirostat state that restricts the row; a draw updates it"""
    forbidden: Sequence[int] = ()
    """Ids that are never drawn, fewer than the vocabulary; ids may repeat"""

    @property
    def is_adjusted(self) -> bool:
        """True if the logits change before the draw."""
        return (
            bool(self.banned)
            or bool(self.forbidden)
            or self.mask is not None
            or self.penalties is not None
            or self.settings.logit_bias is not None
        )

    @property
    def allows_nothing(self) -> bool:
        """True if the mask excludes every id: a token drawn from this row is invalid."""
        return self.mask == b""

    @property
    def noise(self) -> float:
        """Uniform number in [0, 1) that picks the token."""
        return uniform(self.settings.seed, self.choice, self.position)


def uniform(seed: int, choice: int, position: int) -> float:
    """Return a number in [0, 1), a function of its arguments alone on every machine."""
    key = struct.pack("<qQQ", seed, choice, position)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53
