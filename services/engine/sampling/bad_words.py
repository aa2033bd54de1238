"""Bad words: the ids that would complete a run of ids that is never generated."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["BadWords", "narrowed"]


@dataclass(slots=True)
class _Node:
    """A run of ids, read backwards from its end."""

    before: "dict[int, _Node]" = field(default_factory=dict)
    """By the id in front of the run"""
    completing: list[int] = field(default_factory=list)
    """Ids that complete a word behind this run"""


class BadWords:
    """The words of a request. It has no state: all sequences of the request share it."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """words: runs of ids, none of them empty."""
        self._root = _Node()
        for *before, last in words:
            node = self._root
            for token in reversed(before):
                node = node.before.setdefault(token, _Node())
            node.completing.append(last)

    @property
    def looks_back(self) -> bool:
        """Whether what was generated changes which ids complete a word."""
        return bool(self._root.before)

    def completing(self, generated: npt.NDArray[np.int32]) -> Sequence[int]:
        """The ids that complete a word behind these: int32 [generated]. Ids may occur twice."""
        found = list(self._root.completing)
        node: _Node | None = self._root
        place = len(generated)
        while place and node is not None and node.before:
            place -= 1
            node = node.before.get(int(generated[place]))
            if node is not None:
                found += node.completing
        return found


def narrowed(mask: bytes | None, allowed: bytes | None, forbidden: Sequence[int]) -> bytes:
    """What a grammar and a request allow both, without the forbidden ids: a mask without zeros at
    its end, so that b"" allows nothing. None = every id; one of the masks is not None."""
    masks = [each for each in (mask, allowed) if each is not None]
    bits = int.from_bytes(masks[0], "little")
    for other in masks[1:]:
        bits &= int.from_bytes(other, "little")
    both = bytearray(bits.to_bytes(len(masks[0]), "little"))
    for token in forbidden:
        if token >> 3 < len(both):
            both[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return bytes(both.rstrip(b"\0"))
