"""Sizes of the caches: blocks of each group of layers, and slots of states."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CacheLimits", "GroupLimits"]


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Blocks of the layers that keep equal pages."""

    num_blocks: int
    window: int = 0
    """Last tokens whose keys and values a token reads, itself included; 0 = all"""


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Sizes of all caches."""

    block_size: int
    """Tokens of a block, in every group"""
    groups: Sequence[GroupLimits]
    """Groups of attention layers; those without a window come first"""
    state_slots: int = 0
    """Slots of the recurrent layers' states, at least 2; 0 = the model has no such layers"""
    snapshot_interval: int = 0
    """Tokens between two snapshots of a prompt's states, a multiple of `block_size`"""
    chunk_tokens: int = 0
    """Most prompt tokens of a step: a windowed group holds them beside the window"""
    whole_tokens: int = 1
    """Most tokens that one step must compute together, such as those of an image"""
