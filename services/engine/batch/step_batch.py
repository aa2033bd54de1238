"""The flat batch that one engine step runs through the decoder."""

from dataclasses import dataclass, replace

from torch import Tensor

__all__ = ["Kept", "StepBatch"]


@dataclass(frozen=True, slots=True)
class Kept:
    """The rows that somebody looks at: of each sequence its last ones, at least one."""

    rows: Tensor
    """int64 [kept], where they stand among the step's tokens"""
    starts: Tensor
    """int32 [sequences + 1], where each sequence's begin among them; the last entry is `kept`"""
    lengths_host: tuple[int, ...]
    """How many they are of each sequence, for decisions that must not wait for a device"""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's flat batch: sequences that decode one token first, then prefill chunks.

    `tokens` counts the query tokens of all sequences, in the order of the sequences.
    """

    token_ids: Tensor
    """int64 [tokens]"""
    positions: Tensor
    """int64 [tokens], each token's index in its sequence, from 0"""
    slots: Tensor
    """int64 [tokens], the KV slot each token writes: block * block_size + offset"""
    query_starts: Tensor
    """int32 [sequences + 1], where each sequence's tokens begin; the last entry is `tokens`"""
    context_lengths: Tensor
    """int32 [sequences], tokens in the cache after this step"""
    block_tables: Tensor
    """int32 [sequences, widest], rows perhaps apart; past a sequence's blocks stand any others"""
    num_decodes: int
    """The first `num_decodes` sequences have exactly one query token."""
    query_lengths_host: tuple[int, ...]
    """Query tokens of each sequence, for decisions that must not wait for a device"""
    context_lengths_host: tuple[int, ...]
    """`context_lengths` once more, for the same reason"""
    kept: Kept | None = None
    """The rows whose hidden states are of interest, or None for all of them"""

    @property
    def narrowed(self) -> "StepBatch":
        """The batch whose queries are those rows. It still writes keys and values of all tokens."""
        if self.kept is None:
            return self
        return replace(
            self,
            query_starts=self.kept.starts,
            query_lengths_host=self.kept.lengths_host,
            kept=None,
        )
