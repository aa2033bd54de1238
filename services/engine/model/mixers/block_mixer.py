"""Attention to chosen blocks of tokens as a mixer: an indexer beside attention's projections."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.attention import KVCache
from services.engine.model.mixers.attention import (
    AttentionMixer,
    AttentionScratch,
    AttentionWeights,
)
from services.engine.model.mixers.block_attention import BlockAttention
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.mixers.latent_pages import LatentBuffer
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.rotation import Rotation

__all__ = ["BlockMixer", "BlockScratch", "BlockWeights"]


@dataclass(frozen=True, slots=True)
class BlockWeights:
    """Weights of one layer's attention and of its indexer."""

    attention: AttentionWeights
    index: Projection
    """Product that makes a query for each key head, then the key"""
    query_norm: Tensor
    """[index width]"""
    key_norm: Tensor
    """[index width]"""


@dataclass(frozen=True, slots=True)
class BlockScratch(Scratch):
    """Buffers of attention's projections, outputs of the indexer's, and the output of attention."""

    attention: AttentionScratch
    index: Tensor
    """[tokens, (kv_heads + 1) * index width], queries, then the key"""
    out: Tensor
    """[tokens, heads * head_dim], row by row"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.attention.tensors, self.index, self.out


class BlockMixer(Mixer[BlockScratch]):
    """The attention of layer `layer`, which sees the blocks that its indexer chooses."""

    is_capturable = False  # torch's attention reads the lengths of contexts on the host

    def __init__(
        self,
        layer: int,
        spec: AttentionSpec,
        weights: BlockWeights,
        attention: AttentionMixer,
        rotation: int,
        operators: Operators,
        buffer: LatentBuffer,
        group: int,
        epsilon: float,
    ) -> None:
        """attention: computes queries, keys and values, and the product of the output.

        rotation: index of the indexer's RoPE among the step's; buffer: memory that all layers
        share; group: number of the layer's cache group; epsilon: that of the norms.
        """
        self.scratch_key = (attention.scratch_key, spec.index)
        self._layer = layer
        self._spec = spec
        self._weights = weights
        self._projections = attention
        self._rotation = rotation
        self._operators = operators
        self._group = group
        self._epsilon = epsilon
        self._attention = BlockAttention(spec, buffer)
        assert spec.index is not None
        self._shape = (spec.num_kv_heads + 1, spec.index.width)
        """Number of the index's heads, which are queries and then the key; and the width of each"""

    def allocate(self, tokens: int) -> BlockScratch:
        spec, empty = self._spec, self._operators.empty
        return BlockScratch(
            self._projections.allocate(tokens),
            index=empty(tokens, math.prod(self._shape)),
            out=empty(tokens, spec.num_heads * spec.head_dim),
        )

    def allocate_latents(self, num_blocks: int, block_size: int) -> Tensor:
        return self._weights.key_norm.new_zeros(num_blocks, block_size, self._spec.page_width)

    def project(self, rows: Tensor, scratch: BlockScratch, rotations: Sequence[Rotation]) -> None:
        self._projections.project_rotated(rows, scratch.attention, rotations)
        self._weights.index.into(rows, scratch.index)
        self._operators.rotate(
            scratch.index.view(-1, *self._shape),
            self._spec.num_kv_heads,
            rotations[self._rotation],
            self._weights.query_norm,
            self._weights.key_norm,
            self._epsilon,
        )

    def _write(self, batch: StepBatch, cache: KVCache, scratch: BlockScratch) -> None:
        slots, own = batch.of_group(self._group).slots, scratch.attention
        pages, first = cache.latents[self._layer].flatten(0, 1), 0
        for part in (own.keys, own.values, scratch.index.view(-1, *self._shape)[:, -1:]):
            rows = part[: len(slots)].flatten(1)
            pages[:, first : first + rows.shape[1]][slots] = rows
            first += rows.shape[1]

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: BlockScratch,
        kept: BlockScratch | None = None,
    ) -> None:
        self._write(batch, cache, scratch)
        attending, batch = scratch, batch.of_group(self._group)
        if kept is not None:
            attending, outputs = kept, batch.output_rows
            rows = None if outputs is None else outputs.indices
            self._operators.keep(scratch.attention.queries, rows)
            self._operators.keep(scratch.index, rows)
            batch = batch.narrowed
        queries = attending.index.view(-1, *self._shape)[:, :-1]
        pages, own = cache.latents[self._layer], attending.attention
        self._attention.attend(own.queries, queries, pages, batch, attending.out)
        self._operators.arrange(attending.out, own.attended)

    def into(self, scratch: BlockScratch, out: Tensor) -> None:
        self._projections.into(scratch.attention, out)

    def add_to(self, scratch: BlockScratch, hidden: Tensor) -> None:
        self._projections.add_to(scratch.attention, hidden)
