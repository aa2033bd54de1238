"""Flat batch of one engine step, the input of the decoder."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = [
    "ImageRows",
    "OutputRows",
    "PaddedStep",
    "SharedPrefixes",
    "StagedImages",
    "StateSegments",
    "StepBatch",
]


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Rows of a step's tokens that stand for parts of an image."""

    indices: Tensor
    """int64 [rows], indices among the step's tokens"""
    embeddings: Tensor
    """[layers, rows, hidden_size]: the first layer replaces the tokens' embeddings, the others are
    added to the hidden states behind the first decoder layers"""


@dataclass(frozen=True, slots=True)
class StagedImages:
    """Rows of images in a padded step, which are data of a CUDA graph and not its shape."""

    rows: Tensor
    """int32 [tokens], the row of `embeddings` of each token; -1 = it is no part of an image"""
    embeddings: Tensor
    """[layers, at least the rows in use, hidden_size], as in `ImageRows`"""

    @property
    def are_images(self) -> Tensor:
        """Bool [tokens], true for the tokens of images."""
        return self.rows >= 0

    def embeddings_of(self, layer: int) -> Tensor:
        """Return [tokens, hidden_size], arbitrary rows where a token is no part of an image."""
        return self.embeddings[layer].index_select(0, self.rows.clamp(min=0))


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Rows whose hidden states the step returns: the last rows of each sequence, at least one."""

    indices: Tensor
    """int64 [rows], indices among the step's tokens"""
    starts: Tensor
    """int32 [sequences + 1], first row of each sequence; the last entry is `rows`"""
    lengths_host: tuple[int, ...]
    """Number of rows of each sequence, on the host: a decision must not wait for the device"""


@dataclass(frozen=True, slots=True)
class StateSegments:
    """Runs of a step's tokens between two states of the recurrent layers.

    A state is never changed in place: a run reads one slot and writes another. A sequence has one
    run, or several in a row, each of which reads the slot that the run before it wrote: the states
    between them are snapshots, from which other sequences may continue.
    """

    starts: Tensor
    """int32 [runs + 1], first token of each run; the last entry is `tokens`"""
    sources: Tensor
    """int32 [runs], slot of the state before a run; -1 = zeros"""
    targets: Tensor
    """int32 [runs], slot of the state behind a run"""
    lengths_host: tuple[int, ...]
    """Number of tokens of each run, on the host: a decision must not wait for the device"""

    @staticmethod
    def from_zeros(lengths: Sequence[int], device: torch.device) -> "StateSegments":
        """Return one run for each sequence, from zeros to the slot of the sequence's number."""
        count = len(lengths)
        starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
        targets = torch.arange(count, dtype=torch.int32, device=device)
        return StateSegments(starts, torch.full_like(targets, -1), targets, tuple(lengths))


@dataclass(frozen=True, slots=True)
class SharedPrefixes:
    """Whole blocks with which the contexts of several decodes begin. No decode has two prefixes."""

    tokens: Tensor
    """int32 [decodes], number of tokens of each decode's prefix; 0 = it shares none"""
    rows: Tensor
    """int32 [at least the decodes that share a prefix], their row numbers by prefix"""
    starts: Tensor
    """int32 [prefixes + 1], where the rows of each prefix begin in `rows`; behind the last prefix
    there may be empty ones"""


@dataclass(frozen=True, slots=True)
class PaddedStep:
    """Numbers of a padded step with prompts, which are data of a CUDA graph and not its shape.

    Tokens behind the last sequence's stand for nothing, and write to the spare block. So do
    sequences and output rows behind those of the step.
    """

    counts: Tensor
    """int32 [2], number of sequences that decode, and number of all sequences"""
    most_chunks: int
    """Upper bound of the number of other sequences"""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's tokens: sequences that decode one token first, then prefill chunks.

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
    """int32 [sequences, width]; rows may be strided. Entries past a sequence's blocks are
    arbitrary, and those behind a layer's window name blocks of other sequences"""
    num_decodes: int
    """Number of sequences, the first ones, that have exactly one query token"""
    query_lengths_host: tuple[int, ...]
    """Query tokens per sequence, on the host: a decision must not wait for the device"""
    context_lengths_host: tuple[int, ...]
    """`context_lengths`, on the host"""
    prefixes: SharedPrefixes | None = None
    """Prefixes that decodes share; None = unknown, or too few to gain time"""
    adapters_host: tuple[int, ...] = ()
    """Number of each sequence's adapter, 0 = none; empty = no sequence has an adapter, or
    `adapters` says which have one"""
    adapters: Tensor | None = None
    """int32 [tokens], number of each token's adapter, 0 = none, in a padded step whose graph reads
    them; None = `adapters_host` says which sequences have one"""
    states: StateSegments | None = None
    """Runs of tokens for the recurrent layers; None = the model has none"""
    output_rows: OutputRows | None = None
    """Rows whose hidden states are returned; None = all"""
    images: tuple[ImageRows, ...] = ()
    staged_images: StagedImages | None = None
    """Images of a padded step, in place of `images`; None = no graph reads them"""
    rotary_positions: Tensor | None = None
    """int64 [3, tokens], time, row and column of each token in multimodal RoPE; None = all three
    are `positions`"""
    attended_host: tuple[int, ...] = ()
    """Number of tokens at the beginning of each sequence that tokens attend to in an encoder;
    empty = all"""
    token_types: Tensor | None = None
    """int64 [tokens], 1 for tokens of the second text of a pair; None = there are none"""
    further_groups: tuple["StepBatch", ...] = ()
    """Copies of this batch with `slots`, `block_tables` and `visible_ends` of each cache group but
    the first; empty = all groups have the same ones"""
    padded: PaddedStep | None = None
    """Numbers of a padded step with prompts; its fields on the host lack the padding. None = the
    step is not padded, or has no prompts"""
    visible_ends: Tensor | None = None
    """int32 [tokens], index after the last key that each token sees, because the tokens of an image
    see each other; None = each token sees the keys up to its own"""

    @property
    def is_adapted(self) -> bool:
        """True if sequences of the step may have adapters."""
        return bool(self.adapters_host) or self.adapters is not None

    @property
    def is_decode(self) -> bool:
        """True if every sequence decodes one token."""
        return self.num_decodes == len(self.query_lengths_host)

    def of_group(self, number: int) -> "StepBatch":
        """Return this batch with the tables of a cache group, a number from 0."""
        return self.further_groups[number - 1] if number and self.further_groups else self

    def with_groups(self, slots: Sequence[Tensor], tables: Sequence[Tensor]) -> "StepBatch":
        """Return this batch with the slots and block tables of each group but the first."""
        if not slots:
            return self
        further = tuple(
            replace(self, slots=each, block_tables=table, prefixes=None)
            for each, table in zip(slots, tables, strict=True)
        )
        return replace(self, further_groups=further)

    def with_ends(self, ends: Tensor, groups: Sequence[bool]) -> "StepBatch":
        """Return this batch with `ends` as the `visible_ends` of some cache groups.

        groups: true for each cache group that gets `ends`.
        """
        further = tuple(
            replace(group, visible_ends=ends if has_ends else None)
            for group, has_ends in zip(self.further_groups, groups[1:], strict=True)
        )
        return replace(self, visible_ends=ends if groups[0] else None, further_groups=further)

    def first_decodes(self, contexts: Sequence[int]) -> "StepBatch":
        """Return the first sequences of this batch, which decodes, with other host lengths.

        contexts: `context_lengths_host` of these sequences.
        """
        count = len(contexts)
        return replace(
            self,
            token_ids=self.token_ids[:count],
            positions=self.positions[:count],
            slots=self.slots[:count],
            query_starts=self.query_starts[: count + 1],
            context_lengths=self.context_lengths[:count],
            block_tables=self.block_tables[:count],
            num_decodes=count,
            query_lengths_host=(1,) * count,
            context_lengths_host=tuple(contexts),
            further_groups=tuple(each.first_decodes(contexts) for each in self.further_groups),
        )

    def copy(self) -> "StepBatch":
        """Return another batch of the same tensors."""
        return replace(self, further_groups=tuple(map(replace, self.further_groups)))

    @property
    def with_all_rows(self) -> "StepBatch":
        """This batch with an output row for each token."""
        further = tuple(replace(each, output_rows=None) for each in self.further_groups)
        return replace(self, output_rows=None, further_groups=further)

    @property
    def narrowed(self) -> "StepBatch":
        """This batch with the output rows as its only queries. Keys and values stay complete."""
        if self.output_rows is None:
            return self
        ends = self.visible_ends
        return replace(
            self,
            query_starts=self.output_rows.starts,
            query_lengths_host=self.output_rows.lengths_host,
            output_rows=None,
            visible_ends=None if ends is None else ends[self.output_rows.indices],
        )
