"""Interface of attention backends: a paged KV cache and one call per layer."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.batch.transfer import to_device
from services.engine.model.architecture.layers import AttentionSpec

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
    latents: Mapping[int, Tensor] = field(default_factory=dict)
    """Pages [blocks, block_size, width] of each layer that has neither keys nor values, by number:
    latents, or all that is kept of a token in one row"""
    entries: Mapping[int, Tensor] = field(default_factory=dict)
    """Entries of each layer that compresses tokens, by number, [blocks, entries of a block, width].
    Their blocks are those of the first group"""
    states: Mapping[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """States of each recurrent layer, by number: tensors whose first dimension is the slot"""
    groups: Sequence[Sequence[int]] = ()
    """Layers of each cache group; empty = all layers are one group"""

    @property
    def pages(self) -> tuple[Tensor, ...]:
        """Keys, values, latents and entries of all layers."""
        parts = (self.keys, self.values, self.latents, self.entries)
        return tuple(tensor for part in parts for tensor in part.values())

    @property
    def num_blocks(self) -> int:
        """Number of blocks of each layer of the first group."""
        return self.blocks_of(0)

    def blocks_of(self, group: int) -> int:
        """Return the number of blocks of each layer of a cache group; 1 if it has no layers."""
        pages = self._pages_of(group)
        return pages[0].shape[0] if pages else 1

    @property
    def num_slots(self) -> int:
        """Number of slots of states; 0 = there are no recurrent layers."""
        return next((tensors[0].shape[0] for tensors in self.states.values()), 0)

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks, each given as (cache group, source, target); no target is a source."""
        for group in {copy[0] for copy in copies}:
            pages = self._pages_of(group)
            if not pages:
                continue
            places = [(source, target) for number, source, target in copies if number == group]
            index = torch.tensor(places, dtype=torch.int64)
            index = to_device(index, pages[0].device)
            for tensor in pages:
                tensor[index[:, 1]] = tensor[index[:, 0]]

    def _pages_of(self, group: int) -> tuple[Tensor, ...]:
        """Return the tensors whose blocks are those of a group."""
        if not self.groups:
            return self.pages
        parts = (self.keys, self.values, self.latents)
        own = (part[layer] for layer in self.groups[group] for part in parts if layer in part)
        return tuple(own) if group else (*own, *self.entries.values())

    @staticmethod
    def allocate(
        layers: Mapping[int, AttentionSpec],
        num_blocks: int | Mapping[int, int],
        block_size: int,
        make: Callable[[AttentionSpec, int, int], Tensor],
    ) -> "KVCache":
        """Make a cache of these layers; `make` allocates their keys and their values.

        num_blocks: those of every layer, or by layer. `make` gets a layer's number of blocks and
        the width of a head.
        """
        counts = dict.fromkeys(layers, num_blocks) if isinstance(num_blocks, int) else num_blocks
        keys, values = {}, {}
        for index, layer in layers.items():
            keys[index] = make(layer, counts[index], layer.head_dim)
            values[index] = make(layer, counts[index], layer.value_dim)
        return KVCache(keys, values, block_size)


@dataclass(frozen=True, slots=True)
class AttentionStep:
    """Operands of one step's attention: buffers that all layers share.

    Queries, keys and values are after RoPE. They may be views of one wider tensor: only their first
    dimension may have gaps, the same in all three.
    """

    queries: Tensor
    """[rows, heads, head_dim]; a narrowed batch has fewer rows than tokens"""
    keys: Tensor
    """[tokens, kv_heads, head_dim]"""
    values: Tensor
    """[tokens, kv_heads, value_dim]"""
    batch: StepBatch
    cache: KVCache
    out: Tensor
    """[rows, heads * value_dim], contiguous, filled with the result"""
    sinks: Tensor | None = None
    """float32 [heads], one more logit in each head's softmax; None = there are none"""
    slopes: Tensor | None = None
    """float32 [heads], decrease of scores for each token of distance (ALiBi); None = none"""
    cache_group: int = 0
    """Number of the layer's cache group, whose tables `batch` has"""
    is_written: bool = False
    """True if the layer reads the keys and values of another, so the backend must write none"""


class AttentionBackend(ABC):
    """Causal attention over a paged cache, for one spec, dtype and device."""

    name = "native"
    """Name in metrics"""
    block_size = 32
    """Best number of tokens in a block; 32 is one tile of keys"""
    is_capturable = False
    """True if decode launches depend only on row count and table width, so that graphs fit"""
    reads_shared_once = False
    """True if decodes with `StepBatch.prefixes` take less time"""
    sees_chunks = False
    """True if layers whose tokens see their own chunk alone need no `in_chunks`"""
    has_pages = False
    """True if `pages` is supported"""

    def __init__(self, kv_dtype: torch.dtype) -> None:
        self.kv_dtype = kv_dtype
        """Type of cached keys and values"""

    def token_bytes(self, layer: AttentionSpec) -> int:
        """Return the bytes of a token's key and value in a layer."""
        return layer.cached_width * self.kv_dtype.itemsize

    @abstractmethod
    def allocate(
        self,
        num_blocks: int | Mapping[int, int],
        block_size: int,
        layers: Mapping[int, AttentionSpec] | None = None,
    ) -> KVCache:
        """Allocate a zeroed cache. Raises ValueError for an unsupported block size.

        num_blocks: those of every layer, or by layer; layers: the layers that the cache has room
        for, by number; None = the model's.
        """

    def choose_kernels(self, tokens: int) -> None:  # noqa: B027
        """Measure kernels that compute the same on a GPU, and use the fastest from here on.

        tokens: number of the most prompt tokens of a step.
        """

    def pages(self, layer: int, cache: KVCache) -> tuple[Tensor, Tensor]:
        """View a layer's keys and values as [pages, page, kv_heads, width], token by token.

        They are contiguous, or in FP8 as of `fp8_pages.numbers_of`.
        """
        raise NotImplementedError

    @abstractmethod
    def attend(self, layer: int, step: AttentionStep) -> None:
        """Write the step's keys and values to their cache slots, unless `step.is_written`.

        Then fill `step.out`.
        """
