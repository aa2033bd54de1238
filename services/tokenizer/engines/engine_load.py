"""Load of one engine, and the share of its capacity that is in use."""

from dataclasses import dataclass

__all__ = ["EngineLoad"]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Work of an engine now, and its capacity."""

    running: int
    """Number of running sequences"""
    waiting: int
    """Number of waiting sequences"""
    queued_tokens: int
    """Prompt tokens of waiting sequences that are not in the prefix cache"""
    places: int
    """Most sequences that run at once"""
    used_blocks: int
    """KV blocks that sequences hold"""
    total_blocks: int
    """KV blocks in all"""
    block_size: int
    """Tokens of a KV block"""
    tokens_per_second: float
    """Rate of generation, over the last seconds"""

    @property
    def block_share(self) -> float:
        """Share of the KV blocks in use, from 0 to 1."""
        return self.used_blocks / self.total_blocks if self.total_blocks else 0.0

    @property
    def utilization(self) -> float:
        """Larger share of places or of blocks in use, plus waiting sequences per place."""
        if not self.places:
            return self.block_share
        return max(self.running / self.places, self.block_share) + self.waiting / self.places
