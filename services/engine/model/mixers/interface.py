"""Interface of mixers: the half of a layer that combines the tokens of a sequence."""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Generic, Self, TypeVar

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.attention import KVCache
from services.engine.model.operators.rotation import Rotation

__all__ = ["Mixer", "Scratch"]


@dataclass(frozen=True, slots=True)
class Scratch(ABC):
    """Buffers of a mixer, [tokens, …] each, or groups of them. All layers of one shape share them.
    Each kind of mixer has a dataclass of them.
    """

    @property
    @abstractmethod
    def tensors(self) -> tuple[Tensor, ...]:
        """The allocated tensors."""

    def first(self, tokens: int) -> Self:
        """View the buffers of the first `tokens` tokens."""
        held = ((each.name, getattr(self, each.name)) for each in fields(self))
        return replace(self, **{name: _first(value, tokens) for name, value in held})


def _first(value: object, tokens: int) -> object:
    if isinstance(value, Tensor):
        return value[:tokens]
    if isinstance(value, Scratch):
        return value.first(tokens)
    return tuple(_first(each, tokens) for each in value) if isinstance(value, tuple) else value


S = TypeVar("S", bound=Scratch)


class Mixer(ABC, Generic[S]):
    """The mixer of one layer.

    A pass calls `project`, `mix`, and `add_to` or `into` in turn. Only `mix` depends on how the
    tokens are divided among sequences.
    """

    scratch_key: Hashable
    """Key of the buffers, which layers with equal keys share"""
    is_empty = False
    """True if the layer has no mixer, so that the residual need not be normed"""
    is_capturable = True
    """True if `mix` never waits for the host, so that CUDA graphs hold it"""

    @abstractmethod
    def allocate(self, tokens: int) -> S:
        """Allocate the buffers of passes of up to `tokens` tokens."""

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Allocate the states that the mixer keeps of sequences; the first dimension is the slot.

        dtype: that of states that a recurrence reads and writes. Inputs of the last tokens, which
        a convolution reads, have the model's dtype. The result is empty if the mixer keeps only
        data of single tokens (keys, values, latents).
        """
        return ()

    def allocate_latents(self, num_blocks: int, block_size: int) -> Tensor:
        """Allocate pages [blocks, block_size, width] of a mixer that keeps latents of each token.

        Keys and values have the pages of an attention backend.
        """
        raise NotImplementedError

    def allocate_entries(self, num_blocks: int, block_size: int) -> Tensor:
        """Allocate pages [blocks, entries of a block, width] of a mixer that compresses tokens."""
        raise NotImplementedError

    @abstractmethod
    def project(self, rows: Tensor, scratch: S, rotations: Sequence[Rotation]) -> None:
        """Compute the mixer's inputs from `rows`, the normed residual [n, hidden_size].

        rotations: rotations of the step, one for each distinct RoPE of the model.
        """

    @abstractmethod
    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: S,
        kept: S | None = None,
    ) -> None:
        """Write what the cache keeps of each token, and combine the tokens of each sequence.

        kept: buffers of the rows `batch.output_rows`, a view of `scratch`, which alone need an
        output; None = all rows do.
        """

    @abstractmethod
    def into(self, scratch: S, out: Tensor) -> None:
        """Write the output to `out` [n, hidden_size]."""

    @abstractmethod
    def add_to(self, scratch: S, hidden: Tensor) -> None:
        """Add the output to the residual `hidden` [n, hidden_size]."""
