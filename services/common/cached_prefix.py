"""Longest cached prefix of a prompt, for the engine and for services that follow its cache."""

from collections.abc import Container, Sequence
from typing import NamedTuple

__all__ = ["CachedGroup", "longest_prefix", "window_start"]


class CachedGroup(NamedTuple):
    """Hashes of the blocks that one group of layers has in the cache."""

    held: Container[bytes]
    window: int = 0
    """Number of last tokens, itself included, whose keys and values a token reads; 0 = all"""
    holds_states: bool = False
    """True if a hash names the state behind its block, which stands for all tokens before"""


def window_start(start: int, window: int) -> int:
    """Return the index of the first token that the token at index `start` reads."""
    return max(0, start - window + 1) if window else 0


def longest_prefix(hashes: Sequence[bytes], groups: Sequence[CachedGroup], block_size: int) -> int:
    """Return the number of blocks of the longest prefix from which all groups can continue.

    A group without a window must hold every block of the prefix. A group with a window must hold
    the blocks that the next token reads. A group of states must hold the last block's hash.
    Takes a time that is linear in `hashes`.
    """
    count = len(hashes)
    for group in groups:
        if not group.window and not group.holds_states:
            held = group.held
            count = next((i for i in range(count) if hashes[i] not in held), count)
    partial = [
        _Search(hashes, group, block_size, count)
        for group in groups
        if group.window or group.holds_states
    ]
    while partial and count:
        shorter = count
        for search in partial:
            shorter = search.lower(shorter)
        if shorter == count:
            break
        count = shorter
    return count


class _Search:
    """Search of one group, from the longest prefix down. It looks each hash up once."""

    def __init__(
        self, hashes: Sequence[bytes], group: CachedGroup, block_size: int, most: int
    ) -> None:
        self._hashes = hashes
        self._group = group
        self._size = block_size
        self._first = most
        """First index from which the group holds all blocks up to the last result of `lower`"""

    def lower(self, count: int) -> int:
        """Return the largest number of blocks up to `count` from which the group can continue."""
        held, hashes = self._group.held, self._hashes
        if self._group.holds_states:
            while count and hashes[count - 1] not in held:
                count -= 1
            return count
        self._first = min(self._first, count)
        while count:
            needed = window_start(count * self._size, self._group.window) // self._size
            while self._first > needed and hashes[self._first - 1] in held:
                self._first -= 1
            if self._first <= needed:
                break
            self._first = count = self._first - 1
        return count
