"""KV blocks of one engine's cache, as far as this process knows them."""

from collections import Counter
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.common.block_hash import HASH_BYTES
from services.common.cached_prefix import CachedGroup, longest_prefix
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["CacheEventError", "CachedBlocks"]

_TRUST_WEIGHT = 0.2
"""Weight of the newest request in the share of reported tokens that an engine had"""


class CacheEventError(Exception):
    """A response of WatchCache that can't be true; the message says why."""


class CacheLayout(NamedTuple):
    """Sizes of an engine's cache."""

    block_size: int
    """Tokens of a block"""
    groups: tuple[engine_pb2.CacheGroup, ...]


@dataclass(frozen=True, slots=True)
class _Either:
    """Union of two collections of hashes, without a copy."""

    reported: Container[bytes]
    expected: Container[bytes]

    def __contains__(self, block_hash: object) -> bool:
        return block_hash in self.reported or block_hash in self.expected


class CachedBlocks:
    """Hashes of the blocks that an engine has reported, or computes for this process."""

    def __init__(
        self,
        on_changed: Callable[[int, Collection[bytes], Collection[bytes]], None] = lambda *_: None,
    ) -> None:
        """on_changed: called after a change with the number of a group of layers, and the hashes
        that were stored and removed."""
        self._on_changed = on_changed
        self._layout: CacheLayout = CacheLayout(1, (engine_pb2.CacheGroup(),))
        self._reported: list[set[bytes]] = [set()]
        """Reported hashes by group of layers"""
        self._expected: Counter[bytes] = Counter()
        """Blocks of running requests' prompts, with the number of requests that have each"""
        self._number = 0
        """Number of the last response of WatchCache"""
        self.trust = 1.0
        """Share of reported tokens that the engine really had; recent requests weigh more"""

    def forget(self) -> None:
        """Drop all reported hashes: the engine was lost, or will report all of them again."""
        reported = self._reported
        self._reported = [set() for _ in reported]
        self._number = 0
        for number, removed in enumerate(reported):
            self._on_changed(number, (), removed)

    def describe(self, model: engine_pb2.GetModelResponse) -> None:
        """Set the sizes of the engine's cache. If they differ, drop all reported blocks."""
        layout = CacheLayout(model.block_size, tuple(model.cache_groups))
        if layout != self._layout and layout.groups:
            if self.num_reported:
                self.forget()
            # with equal sizes, a stream that has reported an empty cache goes on
            self._layout = layout
            self._reported = [set() for _ in layout.groups]

    @property
    def num_reported(self) -> int:
        """Number of blocks that the engine has reported, over all groups of layers."""
        return sum(map(len, self._reported))

    @property
    def groups(self) -> Sequence[engine_pb2.CacheGroup]:
        """Groups of layers; the layers of a group see the same tokens."""
        return self._layout.groups

    def has_reported(self, group: int, block_hash: bytes) -> bool:
        """Return whether the engine has reported the block for a group of layers."""
        return group < len(self._reported) and block_hash in self._reported[group]

    def apply(self, update: engine_pb2.WatchCacheResponse) -> None:
        """Apply a response of WatchCache. After CacheEventError, call `forget` and watch again."""
        if update.number != self._number + 1:
            raise CacheEventError(f"response {update.number} follows response {self._number}")
        self._number += 1
        groups = self._layout.groups
        if len(update.groups) > len(groups):
            raise CacheEventError(f"it reports {len(update.groups)} groups, and has {len(groups)}")
        if update.is_whole:
            self.forget()
            self._number = update.number
        for number, change in enumerate(update.groups):
            self._apply(number, change)

    def _apply(self, number: int, change: engine_pb2.CacheGroupChange) -> None:
        removed, stored = list(_split(change.removed)), list(_split(change.stored))
        reported, most = self._reported[number], self._layout.groups[number].blocks
        reported.difference_update(removed)
        reported.update(stored)
        if len(reported) > most:
            raise CacheEventError(f"it reports {len(reported):,} blocks, and has {most:,}")
        self._on_changed(number, stored, removed)

    def expect(self, hashes: Sequence[bytes]) -> None:
        """Count on the blocks of a prompt that the engine is about to compute."""
        self._expected.update(hashes)

    def expect_no_more(self, hashes: Sequence[bytes]) -> None:
        """Undo `expect`: the request has ended, and the engine has reported what it keeps."""
        for each in hashes:
            if self._expected[each] > 1:
                self._expected[each] -= 1
            else:
                del self._expected[each]

    def prefix(self, hashes: Sequence[bytes]) -> int:
        """Return the number of blocks of the longest prefix that the engine has or will have.

        The prefix must be there for all groups, so that the engine can continue from it.
        """
        return self._longest(hashes, [_Either(each, self._expected) for each in self._reported])

    def reported_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return the number of blocks of the longest prefix that the engine has reported."""
        return self._longest(hashes, self._reported)

    def _longest(self, hashes: Sequence[bytes], held: Sequence[Container[bytes]]) -> int:
        groups = [
            CachedGroup(some, group.window, holds_states=group.snapshot_interval > 0)
            for some, group in zip(held, self._layout.groups, strict=True)
        ]
        return longest_prefix(hashes, groups, self._layout.block_size)

    def on_admitted(self, promised: int, found: int) -> None:
        """Record how many of the `promised` tokens of a prompt the engine had: `found`."""
        if promised:
            kept = min(1.0, found / promised)
            self.trust += _TRUST_WEIGHT * (kept - self.trust)


def _split(hashes: bytes) -> Iterable[bytes]:
    if len(hashes) % HASH_BYTES:
        raise CacheEventError(f"{len(hashes)} bytes are no hashes of {HASH_BYTES} bytes")
    return (hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES))
