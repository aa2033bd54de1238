"""Sizes of the caches: blocks of each group of layers, and slots of states."""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["CacheLimits", "GroupLimits"]


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """Limits of one group of layers with equal pages."""

    num_blocks: int
    window: int = 0
    """Number of last tokens, itself included, whose keys and values a token reads; 0 = all"""


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Sizes of all caches."""

    block_size: int
    """Number of tokens of a block, in every group"""
    groups: Sequence[GroupLimits]
    """Groups of attention layers; groups without a window come first"""
    state_slots: int = 0
    """Number of slots of recurrent states, at least 2; 0 = the model has no recurrent layers"""
    snapshot_interval: int = 0
    """Number of tokens between two snapshots of a prompt's states, a multiple of `block_size`"""
    chunk_tokens: int = 0
    """Most prompt tokens of a step, which a group with a window holds in addition"""
    whole_tokens: int = 1
    """Most tokens that one step must compute together, such as those of an image"""
