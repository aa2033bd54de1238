"""Cache memory that a model needs: blocks of each group of layers, and slots of states."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CacheNeed", "GroupNeed"]

_TYPICAL_TOKENS = 4096
"""Tokens of the typical sequences by which memory is divided among groups. Most conversations are
shorter; then groups with windows run out of blocks first, but release blocks soon. Long documents
are rare; they need further blocks only of groups without windows, which get the remaining memory"""
_MOST_PAGELESS_BLOCKS = 1 << 17
"""Most blocks of a group without pages: each takes about 200 bytes of the host's memory"""
_LEAST_INTERVAL, _MOST_INTERVAL = 256, 4096
"""Tokens between two snapshots. With a shorter interval, more runs make steps slower; with a longer
one, a prompt that continues from a snapshot computes more than a step"""


@dataclass(frozen=True, slots=True)
class GroupNeed:
    """Cache memory that one group of attention layers needs."""

    block_bytes: int
    """Bytes of a block in all layers of the group; 0 = its layers have no pages"""
    window: int = 0
    """Number of last tokens, itself included, that a token reads; 0 = all"""


@dataclass(frozen=True, slots=True)
class CacheNeed:
    """Cache memory that a model needs, counted in blocks of the first group."""

    model_context: int
    """Context length that the checkpoint states, in tokens"""
    block_size: int
    """Number of tokens of a block"""
    groups: Sequence[GroupNeed]
    """Needs of the groups; a group without a window comes first, if there is one"""
    max_running: int
    step_tokens: int = 1
    """Number of prompt tokens of a step, which a group holds in addition to the windows"""
    state_bytes: int = 0
    """Bytes of a sequence's states; 0 = no layer is recurrent"""

    @property
    def pool_bytes(self) -> list[int]:
        """Bytes of a block of each group, and of a slot of states if there are any."""
        return [
            *(group.block_bytes for group in self.groups),
            *([self.state_bytes] * self.has_states),
        ]

    @property
    def has_states(self) -> bool:
        """True if a layer is recurrent."""
        return self.state_bytes > 0

    def blocks(self, tokens: int, group: int = 0) -> int:
        """Return the most blocks of a group that a sequence of `tokens` tokens holds.

        Blocks without pages take no memory. The blocks of a typical sequence represent its states.
        """
        if not self.groups[group].block_bytes:
            tokens = min(tokens, _TYPICAL_TOKENS)
        needed = -(-tokens // self.block_size)
        window = self.groups[group].window
        if window:
            needed = min(needed, self._span(window - 1 + self.step_tokens))
        return needed

    def longest(self, num_blocks: int) -> int:
        """Return the tokens of the longest sequence for which the first group has room."""
        if num_blocks >= self.blocks(self.model_context):
            return self.model_context
        return num_blocks * self.block_size

    @property
    def most_blocks(self) -> int:
        """Blocks of the first group with which all running sequences may have full length."""
        return self._together(0, self.blocks(self.model_context), self.max_running)

    def divide(self, num_blocks: int) -> tuple[int, ...]:
        """Return the number of each group's blocks if the first group has `num_blocks`.

        Each group has enough for as many typical sequences, and for one of any length, but no more
        than all running sequences need. The sequences share the tokens of a step. Blocks without
        pages suffice for all sequences that have states, whatever their lengths, up to a bound on
        the host's memory.
        """
        typical = min(self.model_context, _TYPICAL_TOKENS)
        if not self.groups[0].block_bytes:
            longest = -(-self.model_context // self.block_size)
            with_states = min(-(-num_blocks // self.blocks(typical)), self.max_running)
            return (max(num_blocks, longest, min(with_states * longest, _MOST_PAGELESS_BLOCKS)),)
        sequences = num_blocks / self.blocks(typical)
        return num_blocks, *(
            min(
                max(self._together(group, self.blocks(typical, group), sequences), longest),
                self._together(group, longest, self.max_running),
            )
            for group in range(1, len(self.groups))
            for longest in (self.blocks(self.longest(num_blocks), group),)
        )

    @property
    def snapshot_interval(self) -> int:
        """Tokens between two snapshots of a prompt's states; 0 without states.

        The pages of these tokens take as much memory as a snapshot, within bounds.
        """
        if not self.state_bytes:
            return 0
        if not self.groups[0].block_bytes:
            return _MOST_INTERVAL
        token_bytes = sum(group.block_bytes for group in self.groups) / self.block_size
        wanted = min(max(self.state_bytes / token_bytes, _LEAST_INTERVAL), _MOST_INTERVAL)
        return round(wanted / self.block_size) * self.block_size

    def state_slots(self, num_blocks: int) -> int:
        """Return the number of slots of states if the first group has `num_blocks` blocks.

        Two slots belong to each typical sequence for which there are blocks, but to no more
        sequences than may run at once. The other slots hold snapshots, one for each interval of
        the tokens that the first group has room for.
        """
        if not self.state_bytes:
            return 0
        typical = min(self.model_context, _TYPICAL_TOKENS)
        sequences = min(-(-num_blocks // self.blocks(typical)), self.max_running)
        snapshots = num_blocks * self.block_size // self.snapshot_interval
        return 2 * sequences + max(snapshots, 1)

    def bytes(self, num_blocks: int) -> int:
        """Return the bytes of all groups and states if the first group has `num_blocks` blocks."""
        blocks = zip(self.divide(num_blocks), self.groups, strict=True)
        pages = sum(count * group.block_bytes for count, group in blocks)
        return pages + self.state_slots(num_blocks) * self.state_bytes

    def affordable(self, memory: int) -> int:
        """Return the most blocks of the first group that fit into `memory` bytes with all else."""
        least, beyond = 0, memory // max(self.groups[0].block_bytes, 1) + 1
        while beyond - least > 1:
            middle = (least + beyond) // 2
            if self.bytes(middle) <= memory:
                least = middle
            else:
                beyond = middle
        return least

    def _together(self, group: int, blocks: int, sequences: float) -> int:
        """Return the most blocks of a group that sequences hold if each of them alone has `blocks`.

        A window's group holds the tokens of one step beside the windows of all sequences.
        """
        held, window = round(blocks * sequences), self.groups[group].window
        if not window:
            return held
        windows = round(min(blocks, self._span(window)) * sequences)
        return min(held, windows + -(-self.step_tokens // self.block_size))

    def _span(self, tokens: int) -> int:
        """Return the most blocks over which `tokens` consecutive tokens can extend."""
        return -(-tokens // self.block_size) + 1
