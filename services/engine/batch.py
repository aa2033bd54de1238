"""The flat batch that one engine step runs through the decoder."""

from dataclasses import dataclass

from torch import Tensor

__all__ = ["StepBatch"]


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
