"""How one token is drawn."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from services.engine.messages import SamplingSettings
from services.engine.sampling.mirostat import Mirostat
from services.engine.sampling.penalties import Penalties

__all__ = ["NOTHING_ALLOWED", "Row", "uniform"]

NOTHING_ALLOWED = -2
"""In the place of a drawn id: the row's limits leave none"""


@dataclass(frozen=True, slots=True)
class Row:
    """How one row of logits is drawn from."""

    settings: SamplingSettings
    choice: int
    position: int
    """Tokens generated before, counted from the end of the original prompt"""
    banned: Sequence[int] = ()
    """Ids that are not drawn unless nothing else is left"""
    mask: bytes | None = None
    """Bit i, least significant first, = id i may be drawn; none past its end. None = every id"""
    penalties: Penalties | None = None
    """Where the tokens so far change the logits"""
    mirostat: Mirostat | None = None
    """Where mirostat restricts the row; the draw moves it on"""
    forbidden: Sequence[int] = ()
    """Ids that are never drawn, fewer than there are; some may stand here twice"""

    @property
    def is_adjusted(self) -> bool:
        """Whether the logits are changed before anything is drawn."""
        return (
            bool(self.banned)
            or bool(self.forbidden)
            or self.mask is not None
            or self.penalties is not None
            or self.settings.logit_bias is not None
        )

    @property
    def allows_nothing(self) -> bool:
        """Whether no id is left to draw: what was drawn from this row stands for nothing."""
        return self.mask == b""

    @property
    def noise(self) -> float:
        """The uniform number that picks the token."""
        return uniform(self.settings.seed, self.choice, self.position)


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1), the same for the same arguments on every machine."""
    key = struct.pack("<qQQ", seed, choice, position)
    bits = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")
    return (bits >> 11) * 2.0**-53
