"""One group of attention layers with equal pages: its pool, and the blocks of sequences."""

from services.common.cached_prefix import window_start
from services.engine.scheduling.block_pool import BlockPool
from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.sequence_cache import BlockTable

__all__ = ["BlockGroup"]


class BlockGroup:
    """Pool of the blocks of one group.

    A group with a window keeps only the blocks that a next token reads. A sequence that grows
    releases the blocks before them.
    """

    def __init__(self, limits: GroupLimits, caches: CacheLimits) -> None:
        self.pool = BlockPool(limits.num_blocks)
        self.window = limits.window
        """Number of last tokens, itself included, that a token reads; 0 = all"""
        self._size = caches.block_size
        self._most = self._blocks_of_window(caches.chunk_tokens)
        self._least = self._blocks_of_window(caches.whole_tokens)

    def blocks_for(self, tokens: int) -> int:
        """Return the number of blocks that `tokens` tokens fill, the last one perhaps partly."""
        return -(-tokens // self._size)

    def first_needed(self, start: int) -> int:
        """Return the index of the first block that a step from the token at `start` on reads."""
        return window_start(start, self.window) // self._size

    def fits(self, tokens: int) -> bool:
        """Return whether a sequence of `tokens` tokens can run alone."""
        needed = self.blocks_for(tokens)
        return (min(needed, self._least) if self.window else needed) <= self.pool.num_blocks

    def missing(self, tokens: int, start: int, found: list[int]) -> int:
        """Return the number of blocks that a sequence of `tokens` tokens lacks.

        start: number of tokens of its cached prefix. found: cached blocks of this prefix that it
        reads; blocks without a holder count as free.
        """
        needed = self.blocks_for(tokens) - self.first_needed(start)
        if self.window:
            needed = min(needed, self._most)
        unheld = self.pool.count_unheld(found)
        return needed - len(found) + unheld - self.pool.num_free

    def grow(self, table: BlockTable, start: int, end: int) -> bool:
        """Prepare a step that computes the tokens from `start` to `end`.

        Releases the blocks that it does not read, and allocates those that it writes. Returns
        False if too few are free.
        """
        self.release_unread(table, start)
        missing = self.blocks_for(end) - len(table.blocks)
        if missing > self.pool.num_free:
            return False
        if missing > 0:
            table.blocks += self.pool.allocate(missing)
        return True

    def release_unread(self, table: BlockTable, start: int) -> None:
        """Release the blocks that no token from `start` on reads."""
        first = min(self.first_needed(start), len(table.blocks))
        if first > table.first:
            # in ascending order: the first block is reused first, because the window moves on
            for block in table.blocks[table.first : first]:
                self.pool.release((block,))
            table.first = first

    def room(self, table: BlockTable) -> int:
        """Return the number of tokens up to which the table can grow now."""
        return (len(table.blocks) + self.pool.num_free) * self._size

    def fork(self, parent: BlockTable, tokens: int) -> tuple[BlockTable, tuple[int, int] | None]:
        """Return the table of a copy of a sequence, of which `tokens` tokens are computed.

        Full blocks are shared. If the last block is partly full, the second value is the block to
        copy and its copy. Raises OutOfBlocksError.
        """
        full, rest = divmod(tokens, self._size)
        own = self.pool.allocate(bool(rest))
        self.pool.hold(parent.blocks[parent.first : full])
        table = BlockTable(parent.blocks[:full] + own, parent.first)
        return table, (parent.blocks[full], own[0]) if rest else None

    def _blocks_of_window(self, tokens: int) -> int:
        """Return the most blocks with keys of `tokens` tokens and of their windows."""
        return self.blocks_for(self.window - 1 + tokens) + 1
