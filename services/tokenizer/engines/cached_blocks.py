"""KV blocks that one engine holds, as far as this process knows."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence

from services.common.block_hash import HASH_BYTES
from tokenwire.pb.engine.v1 import engine_pb2

__all__ = ["CacheEventError", "CachedBlocks"]

_TRUST_WEIGHT = 0.2
"""Weight of the newest request in the share of promised tokens that an engine had"""


class CacheEventError(Exception):
    """A response of WatchCache that can't be true; the message says why."""


class CachedBlocks:
    """Hashes that the engine has reported, and those that it computes for this process."""

    def __init__(
        self,
        on_changed: Callable[[Collection[bytes], Collection[bytes]], None] = lambda *_: None,
    ) -> None:
        """on_changed: called with the hashes that were stored and removed, after a change."""
        self._on_changed = on_changed
        self._reported: set[bytes] = set()
        self._expected: Counter[bytes] = Counter()
        """Blocks of open prompts, which the engine holds or will compute first"""
        self._number = 0
        """Of the last response"""
        self.trust = 1.0
        """Share of the promised tokens that the engine had, of late"""

    def forget(self) -> None:
        """Drop what the engine has reported: it was lost, or reports all of it anew."""
        reported, self._reported = self._reported, set()
        self._number = 0
        self._on_changed((), reported)

    @property
    def num_reported(self) -> int:
        """Blocks that the engine says it holds."""
        return len(self._reported)

    def has_reported(self, block_hash: bytes) -> bool:
        """Return whether the engine says that it holds the block."""
        return block_hash in self._reported

    def apply(self, update: engine_pb2.WatchCacheResponse, most: int) -> None:
        """Take a response of WatchCache. Raises CacheEventError; `forget` then, and watch again.

        most: blocks that the engine has.
        """
        if update.number != self._number + 1:
            raise CacheEventError(f"response {update.number} follows response {self._number}")
        self._number += 1
        removed, stored = list(_split(update.removed)), list(_split(update.stored))
        if update.is_whole:
            removed.extend(self._reported)
            self._reported = set()
        self._reported.difference_update(removed)
        self._reported.update(stored)
        if len(self._reported) > most:
            raise CacheEventError(f"it reports {len(self._reported):,} blocks, and has {most:,}")
        self._on_changed(stored, removed)

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
        """Return the number of blocks of the longest prefix that the engine has or will have."""
        for count, each in enumerate(hashes):
            if each not in self._reported and each not in self._expected:
                return count
        return len(hashes)

    def reported_prefix(self, hashes: Sequence[bytes]) -> int:
        """Return the number of blocks of the longest prefix that the engine says it has."""
        for count, each in enumerate(hashes):
            if each not in self._reported:
                return count
        return len(hashes)

    def on_admitted(self, promised: int, found: int) -> None:
        """Note how many tokens of a prompt the engine had, of those that it had reported."""
        if promised:
            kept = min(1.0, found / promised)
            self.trust += _TRUST_WEIGHT * (kept - self.trust)


def _split(hashes: bytes) -> Iterable[bytes]:
    if len(hashes) % HASH_BYTES:
        raise CacheEventError(f"{len(hashes)} bytes are no hashes of {HASH_BYTES} bytes")
    return (hashes[i : i + HASH_BYTES] for i in range(0, len(hashes), HASH_BYTES))
