"""Interface of attention backends: a paged KV cache and one call per layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.batch.transfer import to_device
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.spec import ModelSpec

__all__ = ["AttentionBackend", "AttentionStep", "KVCache"]


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of all cached tokens, in blocks of `block_size` tokens.

    There is one tensor per layer, because slices of one stacked tensor made steps slower. The first
    dimension is the block; the backend that allocated the cache defines the others.
    """

    keys: Mapping[int, Tensor]
    """Keys of each layer that is attention, by number"""
    values: Mapping[int, Tensor]
    block_size: int
    states: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """States of each recurrent layer, by number: tensors whose first dimension is the slot"""

    @property
    def pages(self) -> tuple[Tensor, ...]:
        """Keys and values of all layers."""
        return (*self.keys.values(), *self.values.values())

    @property
    def num_blocks(self) -> int:
        return self.pages[0].shape[0]

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks within each tensor: source and target each, and no target is a source."""
        pages = self.pages
        index = to_device(torch.tensor(copies, dtype=torch.int64), pages[0].device)
        for tensor in pages:
            tensor[index[:, 1]] = tensor[index[:, 0]]

    @staticmethod
    def allocate(
        layers: Mapping[int, AttentionSpec],
        block_size: int,
        make: Callable[[AttentionSpec], Tensor],
    ) -> "KVCache":
        """Make a cache of these layers, whose keys and whose values `make` allocates."""
        keys, values = ({index: make(layer) for index, layer in layers.items()} for _ in range(2))
        return KVCache(keys, values, block_size)

    @staticmethod
    def bytes_per_block(spec: ModelSpec, block_size: int, dtype: torch.dtype) -> int:
        """Return the memory of one block: keys and values of all layers."""
        widths = (layer.num_kv_heads * layer.head_dim for layer in spec.paged_layers.values())
        return 2 * sum(widths) * block_size * dtype.itemsize


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Operands of one step's attention: buffers that all layers share.

    Queries, keys and values are after RoPE. They may be views of one wider tensor: only their first
    dimension may have gaps.
    """

    queries: Tensor
    """[rows, heads, head_dim]; a narrowed batch has fewer rows than tokens"""
    keys: Tensor
    """[tokens, kv_heads, head_dim]"""
    values: Tensor
    """[tokens, kv_heads, head_dim]"""
    batch: StepBatch
    cache: KVCache
    out: Tensor
    """[rows, heads * head_dim], contiguous; to be filled"""
    sinks: Tensor | None = None
    """float32 [heads], one more logit in each head's softmax; None = there are none"""
    is_written: bool = False
    """True if the cache already holds the keys and values, so the backend must not write them"""


class AttentionBackend(ABC):
    """Causal attention over a paged cache, for one spec, dtype and device."""

    name = "native"
    """Name in metrics"""
    block_size = 32
    """Best number of tokens in a block; 32 is one tile of keys"""
    is_capturable = False
    """True if decode launches depend only on row count and table width, so one CUDA graph fits"""
    reads_shared_once = False
    """True if decodes with `StepBatch.shared_tokens` take less time"""
    writes_apart = False
    """True if `write` may run before `attend`, which then gets a step that `is_written`"""

    @abstractmethod
    def allocate(
        self, num_blocks: int, block_size: int, layers: Mapping[int, AttentionSpec] | None = None
    ) -> KVCache:
        """Allocate a zeroed cache. Raises ValueError for an unsupported block size.

        layers: those that it has room for, by number; None = the model's.
        """

    @abstractmethod
    def attend(self, layer: int, step: AttentionStep) -> None:
        """Write the step's keys and values to their cache slots, unless `step.is_written`.

        Then fill `step.out`.
        """

    def write(self, layer: int, step: AttentionStep) -> None:
        """Write the step's keys and values to their cache slots. Its queries may be missing."""
        raise NotImplementedError
