"""Caches of all groups of layers: prefix lookup, allocation, sharing and release."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from services.common.cached_prefix import CachedGroup, longest_prefix
from services.engine.messages import CacheChange, PoolUse
from services.engine.model_description import CacheGroup
from services.engine.scheduling.block_group import BlockGroup
from services.engine.scheduling.block_pool import OutOfBlocksError
from services.engine.scheduling.cache_limits import CacheLimits
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.sequence_cache import BlockTable
from services.engine.scheduling.state_pool import StatePool

__all__ = ["BlockCopy", "CachePools", "Prefix"]


class Prefix(NamedTuple):
    """Longest prefix of a sequence that every group has in the cache."""

    tokens: int
    blocks: Sequence[list[int]]
    """Blocks that the next token reads, in order, by group"""
    state: int
    """Slot of the snapshot behind the prefix; -1 = none"""


class BlockCopy(NamedTuple):
    """A block to copy before the next step."""

    group: int
    source: int
    target: int


class CachePools:
    """Owner of the pools of all groups, and of the blocks and slots that sequences hold."""

    def __init__(self, limits: CacheLimits) -> None:
        self.block_size = limits.block_size
        """Number of tokens of a block"""
        self.groups = [BlockGroup(group, limits) for group in limits.groups]
        self._states = StatePool(limits) if limits.state_slots else None
        self.has_states = self._states is not None
        """True if the model has recurrent layers"""
        self._pools = [group.pool for group in self.groups]
        self._cached = [CachedGroup(group.pool.cached, group.window) for group in self.groups]
        if self._states is not None:
            self._pools.append(self._states.pool)
            self._cached.append(CachedGroup(self._states.pool.cached, holds_states=True))

    # Room.

    @property
    def num_blocks(self) -> int:
        """Number of blocks of the first group, the unit of the load."""
        return self._pools[0].num_blocks

    @property
    def num_free(self) -> int:
        """Free blocks of the scarcest group, scaled to the size of the first one."""
        total = self.num_blocks
        return min(pool.num_free * total // pool.num_blocks for pool in self._pools)

    @property
    def most_tokens(self) -> int:
        """Length of the longest sequence for which the groups without a window have blocks."""
        counts = [each.pool.num_blocks for each in self.groups if not each.window]
        return min(counts or [self.num_blocks]) * self.block_size

    def fits(self, tokens: int) -> bool:
        """Return whether a sequence of `tokens` tokens can ever run."""
        return all(group.fits(tokens) for group in self.groups)

    def missing(self, sequence: TokenSequence, prefix: Prefix, running: int) -> list[int]:
        """Return by pool the number of blocks that a waiting sequence lacks.

        A block for each running sequence stays in reserve, or the newcomer would soon be preempted.
        """
        missing = [
            group.missing(sequence.length, prefix.tokens, found) + running
            for group, found in zip(self.groups, prefix.blocks, strict=True)
        ]
        if self._states is not None:
            missing.append(self._states.missing(prefix.state))
        return missing

    def freed_by(self, sequence: TokenSequence) -> list[int]:
        """Return by pool the number of blocks that become free if a sequence is preempted.

        The block that is reserved for its growth is one of them.
        """
        freed = [
            group.pool.count_unshared(table.held) + 1
            for group, table in zip(self.groups, sequence.tables, strict=True)
        ]
        if self._states is not None and sequence.states is not None:
            freed.append(self._states.pool.count_unshared(sequence.states.held))
        return freed

    # Prefixes.

    def find(self, hashes: Sequence[bytes]) -> Prefix:
        """Return the longest prefix of a sequence that all groups have."""
        count = longest_prefix(hashes, self._cached, self.block_size)
        tokens = count * self.block_size
        blocks = [
            [group.pool.cached[each] for each in hashes[group.first_needed(tokens) : count]]
            for group in self.groups
        ]
        state = self._states.pool.cached[hashes[count - 1]] if self._states and count else -1
        return Prefix(tokens, blocks, state)

    def pending_hashes(self, sequence: TokenSequence) -> Iterator[bytes]:
        """Yield the hashes that a running sequence is about to add to the cache.

        Another sequence with one of these hashes can continue from there if it waits.
        """
        if self._states is not None:
            yield from self._states.pending_hashes(sequence)
            return
        size = self.block_size
        for index in range(sequence.num_computed // size, sequence.length // size):
            yield sequence.block_hash(index)

    def awaited_hash(
        self, hashes: Sequence[bytes], prefix: Prefix, pending: set[bytes]
    ) -> bytes | None:
        """Return a hash of a waiting sequence that others are about to add; None = no such hash."""
        first = prefix.tokens // self.block_size
        following = hashes[first : first + 1] if self._states is None else hashes[first:]
        return next((each for each in following if each in pending), None)

    # Sequences.

    def start(self, sequence: TokenSequence, prefix: Prefix, least: int) -> None:
        """Give a waiting sequence its prefix and room for its tokens.

        A group with a window has room for the next `least` tokens; `grow` adds more. Raises
        OutOfBlocksError unless `missing` is 0 or the sequence runs alone.
        """
        first = prefix.tokens // self.block_size
        tables: list[BlockTable] = []
        for group, found in zip(self.groups, prefix.blocks, strict=True):
            stale = first - len(found)
            group.pool.hold(found)
            tables.append(BlockTable([0] * stale + found, stale))
        sequence.tables = tuple(tables)
        sequence.num_computed = prefix.tokens
        if self._states is not None:
            self._states.start(sequence, prefix.tokens, prefix.state)
        for group, table in zip(self.groups, tables, strict=True):
            end = min(prefix.tokens + least, sequence.length) if group.window else sequence.length
            if not group.grow(table, prefix.tokens, end):
                raise OutOfBlocksError
        self._note_capacity(sequence)

    def step_start(self, sequence: TokenSequence) -> int:
        """Return the first token of a sequence's next step.

        After a rejected draft it comes before the uncomputed tokens, because the state behind the
        accepted tokens was not written.
        """
        return sequence.num_computed if sequence.states is None else sequence.states.source_end

    def grow(self, sequence: TokenSequence, end: int) -> bool:
        """Make room for a step that computes tokens up to `end`. Return False if it has no room.

        Releases the blocks that the step does not read.
        """
        if self._states is not None and not self._states.advance(sequence):
            return False
        if end <= sequence.capacity:
            return True
        start = self.step_start(sequence)
        grown = [
            group.grow(table, start, end)
            for group, table in zip(self.groups, sequence.tables, strict=True)
        ]
        self._note_capacity(sequence)
        return all(grown)

    def grow_most(self, sequence: TokenSequence, end: int) -> int:
        """Make room for tokens up to `end`, or fewer if blocks are scarce. Return the new end."""
        start = self.step_start(sequence)
        for group, table in zip(self.groups, sequence.tables, strict=True):
            group.release_unread(table, start)
            end = min(end, group.room(table))
        self.grow(sequence, end)
        return end

    def plan(self, sequence: TokenSequence, end: int) -> None:
        """Plan the recurrent states that a step up to the token before `end` writes."""
        if self._states is not None:
            self._states.plan(sequence, end)

    def publish(self) -> None:
        """Let prompts find the states that the newest step writes."""
        if self._states is not None:
            self._states.publish()

    def cache_blocks(self, sequence: TokenSequence, first: int) -> None:
        """Cache the full blocks of known tokens, from index `first` on."""
        known = min(sequence.num_computed, sequence.length)
        for index in range(first, known // self.block_size):
            block_hash = sequence.block_hash(index)
            for pool, table in zip(self._pools, sequence.tables, strict=False):
                pool.cache(table.blocks[index], block_hash)

    def fork(self, beam: TokenSequence, parent: TokenSequence) -> list[BlockCopy] | None:
        """Give a beam without blocks those of its parent. Return the blocks to copy.

        None = too few blocks are free, and the beam gets none.
        """
        own = int(parent.length % self.block_size > 0)
        if any(group.pool.num_free < own for group in self.groups):
            return None
        tables, copies = [], []
        for number, (group, table) in enumerate(zip(self.groups, parent.tables, strict=True)):
            copied, copy = group.fork(table, parent.length)
            tables.append(copied)
            if copy is not None:
                copies.append(BlockCopy(number, *copy))
        beam.tables = tuple(tables)
        beam.num_computed = parent.num_computed
        self._note_capacity(beam)
        if self._states is not None:
            self._states.fork(beam, parent)
        return copies

    def release(self, sequence: TokenSequence) -> None:
        """Release the blocks and slots of a sequence. Cached ones stay until room is needed."""
        for group, table in zip(self.groups, sequence.tables, strict=False):
            group.pool.release(table.held)
        if self._states is not None:
            self._states.release(sequence)
        sequence.tables = ()
        sequence.capacity = 0

    # Failed steps.

    def uncache(self, sequence: TokenSequence, start: int) -> None:
        """Remove the newest step's states and the blocks of tokens from `start` on from the cache.

        A step failed to write them.
        """
        for group, blocks in zip(self.groups, self._blocks_from(sequence, start), strict=False):
            group.pool.invalidate(blocks)
        if self._states is not None:
            self._states.drop_snapshots(sequence)

    def sharing(
        self, sequence: TokenSequence, start: int, others: Iterable[TokenSequence]
    ) -> list[TokenSequence]:
        """Return the others that hold some of a sequence's blocks of tokens from `start` on."""
        mine = [set(blocks) for blocks in self._blocks_from(sequence, start)]
        return [
            other
            for other in others
            if other is not sequence
            and any(
                not blocks.isdisjoint(table.held)
                for blocks, table in zip(mine, other.tables, strict=True)
            )
        ]

    def _blocks_from(self, sequence: TokenSequence, start: int) -> list[list[int]]:
        """Return by group the blocks that a sequence holds of its tokens from `start` on."""
        first = start // self.block_size
        return [table.blocks[max(first, table.first) :] for table in sequence.tables]

    # The cache as a whole.

    def describe(self) -> list[CacheGroup]:
        """Return the groups in the order of `take_changes`."""
        groups = [CacheGroup(group.pool.num_blocks, group.window) for group in self.groups]
        if self._states is not None:
            slots, interval = self._states.pool.num_blocks, self._states.interval
            groups.append(CacheGroup(slots, snapshot_interval=interval))
        return groups

    def uses(self) -> tuple[PoolUse, ...]:
        """Return the use of each group, in the order of `describe`."""
        return tuple(
            PoolUse(pool.num_blocks - pool.num_free, pool.num_cached) for pool in self._pools
        )

    def flush(self) -> int:
        """Uncache all blocks and states that no sequence holds. Return their number."""
        return sum(pool.flush() for pool in self._pools)

    def follow(self) -> None:
        """Record all cached hashes now, and every change from now on."""
        for pool in self._pools:
            pool.follow()

    def take_changes(self) -> Sequence[CacheChange | None]:
        """Return by pool the change of the cache since the last call; empty without a change."""
        changes = [pool.take_change() for pool in self._pools]
        return changes if any(changes) else ()

    def check(self, running: Iterable[TokenSequence]) -> None:
        """Raise AssertionError unless the pools agree with all running sequences."""
        sequences = [*running]
        for number, group in enumerate(self.groups):
            group.pool.check([each.tables[number].held for each in sequences])
        if self._states is not None:
            self._states.pool.check([each.states.held for each in sequences if each.states])

    def _note_capacity(self, sequence: TokenSequence) -> None:
        covered = [len(table.blocks) for table in sequence.tables]
        # layers without pages of tokens take any number of them
        sequence.capacity = min(covered) * self.block_size if covered else 1 << 62
