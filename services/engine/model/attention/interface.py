"""What the decoder asks of attention: a paged cache, and one call per layer."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.spec import ModelSpec

__all__ = ["AttentionBackend", "KVCache"]


@dataclass(frozen=True, slots=True)
class KVCache:
    """The keys and values of every cached token, in blocks of `block_size` tokens.

    One tensor per layer, the block its first dimension; the rest is the layout of the backend that
    allocated it. Kept apart by layer because slices of one stacked tensor made steps slower.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    block_size: int

    @property
    def num_blocks(self) -> int:
        return self.keys[0].shape[0]

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Memory of one block in all layers together, keys and values."""
        return 2 * spec.num_layers * spec.num_kv_heads * spec.head_dim * block_size * dtype.itemsize


class AttentionBackend(ABC):
    """Causal attention over a paged cache. Made for one spec, dtype and device."""

    block_size = 32
    """Tokens of a block that suit it best: one tile's worth of keys"""
    is_capturable = False
    """Whether what a step that only decodes launches depends on nothing but its rows and the width
    of its block tables, so that a CUDA graph of it serves them all"""

    @abstractmethod
    def allocate(self, num_blocks: int, block_size: int) -> KVCache:
        """A zeroed cache in this backend's layout. ValueError for a block size it cannot do."""

    @abstractmethod
    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        batch: StepBatch,
        cache: KVCache,
        out: Tensor,
    ) -> None:
        """Writes the step's keys and values to their slots, then fills `out`.

        queries: [rows, heads, head_dim], a row for each token or, of a narrowed batch, for those
        that are kept; keys, values: [tokens, kv_heads, head_dim]; the rotation already applied.
        They may be views of one wider tensor: only the first dimension may have gaps. out:
        [rows, heads * head_dim], contiguous.
        """
