"""Default limits of steps: sequences that run at once, and prompt tokens of a step."""

from dataclasses import dataclass

import torch

from services.engine.execution.memory_budget import available_memory
from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.attention.multiprocessors import count_multiprocessors
from services.engine.model.model import Model

__all__ = ["CPU_LIMITS", "Card", "StepLimits", "default_limits", "limits_of_card"]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """Limits of one step."""

    running: int
    """Most sequences that run at the same time"""
    tokens: int
    """Most prompt tokens"""


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU that holds the weights of a model, as far as the limits depend on it."""

    free_bytes: int
    """Memory that the weights leave"""
    multiprocessors: int
    sequence_bytes: int
    """Cached keys, values and states of a typical sequence"""
    step_bytes: int
    """Buffers of a step for each of its tokens"""
    row_bytes: int
    """Logits of a sequence, and their copies in a draw"""


CPU_LIMITS = StepLimits(256, 4096)
_RUNNING = (1024, 768, 512, 384)
"""Numbers of sequences above the least, which decode steps are padded to"""
_MORE_TOKENS = 8192
_MORE_TOKENS_FROM = 100
"""Multiprocessors from which a step has more tokens. A smaller card would take a second for them"""
_BUFFER_SHARE = 16
"""Buffers of steps take at most one part in so many of the free memory"""
_TYPICAL_TOKENS = 512
"""Tokens of a typical sequence: more sequences than the cache holds would preempt each other"""
_LOGITS_COPIES = 5
"""Logits, and the copies that a draw with top-p makes: candidates, weights and their sums"""


def default_limits(decoder: Model) -> StepLimits:
    """Return the limits of a model that is in memory, on its device."""
    if decoder.device.type != "cuda" or not decoder.computes_logits:
        return CPU_LIMITS
    return limits_of_card(_card(decoder))


def limits_of_card(card: Card) -> StepLimits:
    """Return as many sequences as the cache can hold, and tokens that fill the multiprocessors."""
    most = card.free_bytes // _BUFFER_SHARE
    tokens = CPU_LIMITS.tokens
    if card.multiprocessors >= _MORE_TOKENS_FROM and _MORE_TOKENS * card.step_bytes <= most:
        tokens = _MORE_TOKENS
    for running in _RUNNING:
        buffers = (tokens + running) * card.step_bytes + running * card.row_bytes
        if buffers <= most and running * card.sequence_bytes <= card.free_bytes - buffers:
            return StepLimits(running, tokens)
    return StepLimits(CPU_LIMITS.running, tokens)


def _card(decoder: Model) -> Card:
    size = decoder.block_size
    groups = layer_groups(decoder.spec)
    blocks = (-(-min(_TYPICAL_TOKENS, group.window or _TYPICAL_TOKENS) // size) for group in groups)
    pages = sum(
        count * decoder.block_bytes(group) for count, group in zip(blocks, groups, strict=True)
    )
    return Card(
        available_memory(decoder.device),
        count_multiprocessors(decoder.device),
        # a sequence has two slots of states
        pages + 2 * decoder.state_bytes,
        decoder.bytes_to_reserve(1, 0),
        _LOGITS_COPIES * decoder.spec.vocab_size * torch.float32.itemsize,
    )
