"""Pool of KV blocks: allocation, reference counts, prefix lookup.

A full block is identified by a hash of its parent's hash, its own ids and their images. Equal
prefixes, the n choices of a prompt and a preempted sequence find their blocks by this hash. A block
without a holder keeps its contents until it is allocated again; the oldest is allocated first.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from services.engine.messages import CacheChange

__all__ = ["BlockPool", "OutOfBlocksError"]


class OutOfBlocksError(Exception):
    """Fewer blocks are free than were requested."""


class BlockPool:
    """Reference counts and cached hashes of all KV blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        self.num_cached = 0
        """Number of blocks without a holder that keep a cached prefix"""
        self._changes: dict[bytes, bool] | None = None
        """Hashes that changed since the last `take_change`: True = cached, False = uncached"""
        # blocks without a holder in the order of reuse; uncached ones come first
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))

    @property
    def num_free(self) -> int:
        """Number of blocks without a holder, cached ones among them."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Allocate blocks with one holder each. Raises OutOfBlocksError if fewer are free."""
        if count > len(self._free):
            raise OutOfBlocksError
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self.num_cached -= self._hashes[block] is not None
            self._uncache(block)
            self._holders[block] = 1
        return blocks

    @property
    def cached(self) -> Mapping[bytes, int]:
        """Cached blocks by their hashes: a view."""
        return self._cached

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to cached or held blocks."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
                self.num_cached -= self._hashes[block] is not None
            self._holders[block] += 1

    def count_unheld(self, blocks: Iterable[int]) -> int:
        """Count the blocks that have no holder."""
        return sum(self._holders[block] == 0 for block in blocks)

    def count_unshared(self, blocks: Iterable[int]) -> int:
        """Count the blocks with one holder, which become free if their sequence releases them."""
        return sum(self._holders[block] == 1 for block in blocks)

    def cache(self, block: int, block_hash: bytes) -> None:
        """Cache a held, full block under its hash, unless another block has that hash."""
        if self._hashes[block] is None and block_hash not in self._cached:
            self._hashes[block] = block_hash
            self._cached[block_hash] = block
            if self._changes is not None:
                self._changes[block_hash] = True

    def follow(self) -> None:
        """Record all cached hashes now, and every change from now on."""
        if self._changes is None:
            self._changes = dict.fromkeys(self._cached, True)

    def take_change(self) -> CacheChange | None:
        """Return the change of the cache since the last call; None without one."""
        if not self._changes:
            return None
        changes, self._changes = self._changes, {}
        return CacheChange(
            stored=[each for each, is_cached in changes.items() if is_cached],
            removed=[each for each, is_cached in changes.items() if not is_cached],
        )

    def invalidate(self, blocks: Iterable[int]) -> None:
        """Remove held blocks from the cache, because their contents were not written."""
        for block in blocks:
            self._uncache(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a holder from each of a sequence's blocks, given in the order of the sequence.

        The last blocks are reused first, because a prefix is useful without its end, and an end
        without its prefix is not.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)
                else:
                    self.num_cached += 1

    def demote(self, block_hash: bytes) -> None:
        """Let a cached block be reused before all others, unless it has a holder."""
        block = self._cached.get(block_hash)
        if block is not None and self._holders[block] == 0:
            self._free.move_to_end(block, last=False)

    def flush(self) -> int:
        """Remove the blocks without a holder from the cache. Return their number."""
        cached = [block for block in self._free if self._hashes[block] is not None]
        for block in cached:
            self._uncache(block)
        self.num_cached = 0
        return len(cached)

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables of all sequences."""
        counts = [0] * self.num_blocks
        for blocks in tables:
            for block in blocks:
                counts[block] += 1
        assert counts == self._holders, "holders differ from the block tables"
        free = {block for block, count in enumerate(counts) if count == 0}
        assert free == set(self._free), "a block is lost, or free while it is held"
        cached = sum(self._hashes[block] is not None for block in free)
        assert cached == self.num_cached, "the count of cached blocks is wrong"
        for block_hash, block in self._cached.items():
            assert self._hashes[block] == block_hash, "a cached hash points to another block"

    def _uncache(self, block: int) -> None:
        block_hash = self._hashes[block]
        if block_hash is not None:
            del self._cached[block_hash]
            self._hashes[block] = None
            if self._changes is not None:
                self._changes[block_hash] = False
