"""KV blocks: who holds which, and which prefixes they contain.

A full block is known by a hash of its parent's hash and its own ids, so that equal prefixes, the n
choices of one prompt and a preempted sequence all find their blocks again. A block that nobody
holds keeps its contents until it is needed for something else, oldest first.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["BlockPool", "OutOfBlocksError", "hash_block"]


class OutOfBlocksError(Exception):
    """No free block is left."""


def hash_block(parent: bytes, ids: npt.NDArray[np.int32]) -> bytes:
    """The name of a full block: 16 bytes over its parent's name and its own ids.

    The parent of a sequence's first block is its cache salt.
    """
    return hashlib.blake2b(ids.tobytes(), key=parent[:64], digest_size=16).digest()


class BlockPool:
    """Hands out blocks, counts their holders, and remembers the prefixes in them."""

    def __init__(self, num_blocks: int) -> None:
        self._holders = [0] * num_blocks
        self._names: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        # Blocks without a holder, the next to be reused first; those that cache nothing lead.
        self._free: OrderedDict[int, None] = OrderedDict((b, None) for b in range(num_blocks))

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Blocks without a holder; what they cache is lost when they are handed out."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Blocks with one holder each. Raises OutOfBlocksError and hands out none if too few."""
        if count > len(self._free):
            raise OutOfBlocksError
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._forget(block)
            self._holders[block] = 1
        return blocks

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The blocks that hold the longest known run of `names` from its start."""
        found: list[int] = []
        for name in names:
            block = self._cached.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to blocks that `find` returned."""
        for block in blocks:
            if self._holders[block] == 0:
                del self._free[block]
            self._holders[block] += 1

    def count_unheld(self, blocks: Iterable[int]) -> int:
        """How many of some blocks nobody holds."""
        return sum(self._holders[block] == 0 for block in blocks)

    def count_freed(self, blocks: Iterable[int]) -> int:
        """How many of a sequence's blocks nobody else holds."""
        return sum(self._holders[block] == 1 for block in blocks)

    def name(self, block: int, name: bytes) -> None:
        """Make the contents of a held, full block known. The first block of a name keeps it."""
        if self._names[block] is None and name not in self._cached:
            self._names[block] = name
            self._cached[name] = block

    def void(self, blocks: Iterable[int]) -> None:
        """Forget what held blocks contain: it was not written."""
        for block in blocks:
            self._forget(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Take a holder from blocks, given in the order of the sequence.

        The last blocks of a sequence are reused first: a prefix is of use without its end, but not
        the other way round.
        """
        for block in reversed(blocks):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._free[block] = None
                if self._names[block] is None:
                    self._free.move_to_end(block, last=False)

    def flush(self) -> int:
        """Forget what blocks without a holder cache. Returns how many there were."""
        cached = [block for block in self._free if self._names[block] is not None]
        for block in cached:
            self._forget(block)
        return len(cached)

    def check(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the pool agrees with the block tables of all sequences."""
        counts = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                counts[block] += 1
        assert counts == self._holders, "holders differ from the block tables"
        free = {block for block, count in enumerate(counts) if count == 0}
        assert free == set(self._free), "a block is lost, or free while it is held"
        for name, block in self._cached.items():
            assert self._names[block] == name, "a cached name points to another block"

    def _forget(self, block: int) -> None:
        name = self._names[block]
        if name is not None:
            del self._cached[name]
            self._names[block] = None
