"""Bad words, which are runs of ids that must not be generated, and intersection of masks."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

__all__ = ["BadWords", "intersect_masks"]


@dataclass(slots=True)
class _Node:
    """Trie node: a run of ids, read backwards from its end."""

    before: "dict[int, _Node]" = field(default_factory=dict)
    """Longer runs, by the id in front of this one"""
    forbidden: list[int] = field(default_factory=list)
    """Ids that complete a bad word after this run"""


class BadWords:
    """A request's bad words as a trie. Stateless: all sequences of the request share it."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        """words: runs of ids, none of them empty."""
        self._root = _Node()
        for *before, last in words:
            node = self._root
            for token in reversed(before):
                node = node.before.setdefault(token, _Node())
            node.forbidden.append(last)

    @property
    def looks_back(self) -> bool:
        """True if the forbidden ids depend on the tokens generated before."""
        return bool(self._root.before)

    def forbidden_after(self, generated: npt.NDArray[np.int32]) -> Sequence[int]:
        """Return the ids that would complete a bad word after `generated`, int32 [length].

        Ids may repeat.
        """
        forbidden = list(self._root.forbidden)
        node: _Node | None = self._root
        place = len(generated)
        while place and node is not None and node.before:
            place -= 1
            node = node.before.get(int(generated[place]))
            if node is not None:
                forbidden += node.forbidden
        return forbidden


def intersect_masks(mask: bytes | None, allowed: bytes | None, forbidden: Sequence[int]) -> bytes:
    """Return the mask of the ids that both masks allow, without `forbidden`.

    None stands for every id; at least one mask is not None. The result has no trailing zero bytes,
    so b"" means that no id is left.
    """
    masks = [each for each in (mask, allowed) if each is not None]
    if len(masks) == 1 and not forbidden:
        return masks[0].rstrip(b"\0")
    size = min(map(len, masks))
    both = np.frombuffer(masks[0], np.uint8, size)
    both = both & np.frombuffer(masks[-1], np.uint8, size)
    for token in forbidden:
        if token >> 3 < size:
            both[token >> 3] &= ~(1 << (token & 7)) & 0xFF
    return both.tobytes().rstrip(b"\0")
