"""Attention with addends by distance and short convolutions as a mixer (Inkling)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.attention import KVCache
from services.engine.model.mixers.attention import (
    AttentionMixer,
    AttentionScratch,
    AttentionWeights,
)
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.mixers.latent_pages import LatentBuffer
from services.engine.model.mixers.relative_attention import RelativeAttention
from services.engine.model.mixers.runs import RunGroups, convolve_rows
from services.engine.model.operators.interface import HeadNorms, Operators, Projection
from services.engine.model.operators.rotation import Rotation

__all__ = ["RelativeMixer", "RelativeScratch", "RelativeWeights"]


@dataclass(frozen=True, slots=True)
class RelativeWeights:
    """Weights of one layer's attention, of its addends and of its convolutions."""

    attention: AttentionWeights
    """Weights of the attention's products; its own norms are None"""
    norms: HeadNorms
    """Norms of queries and of convolved keys"""
    states: Projection
    """Product that makes the factors of the table's rows, head by head"""
    table: Tensor
    """float32 [rank, extent]"""
    keys: Tensor
    """float32 [conv_width, kv_heads * head_dim]; all three have the newest token's factors last"""
    values: Tensor
    """float32 [conv_width, kv_heads * head_dim]"""
    output: Tensor
    """float32 [conv_width, hidden_size]"""


@dataclass(frozen=True, slots=True)
class RelativeScratch(Scratch):
    """Buffers of attention's projections, and of the computations after them."""

    attention: AttentionScratch
    states: Tensor
    """[tokens, heads * rank]"""
    attended: Tensor
    """[tokens, heads * head_dim], row by row"""
    out: Tensor
    """[tokens, hidden_size], the output projection's, convolved"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return *self.attention.tensors, self.states, self.attended, self.out


class RelativeMixer(Mixer[RelativeScratch]):
    """The attention of layer `layer`, whose keys, values and output are convolved.

    Convolutions also read their inputs for the last tokens, which each sequence keeps.
    """

    is_capturable = False  # torch's attention reads the lengths of contexts on the host

    def __init__(
        self,
        layer: int,
        spec: AttentionSpec,
        weights: RelativeWeights,
        attention: AttentionMixer,
        operators: Operators,
        buffer: LatentBuffer,
        groups: RunGroups,
        group: int,
        epsilon: float,
        dtype: torch.dtype,
    ) -> None:
        """attention: computes queries, keys and values, and the product of the output.

        buffer, groups: memory and runs' groups, which all layers share; group: number of the
        layer's cache group; epsilon: that of the norms; dtype: the model's.
        """
        self.scratch_key = (attention.scratch_key, spec.relative)
        self._layer = layer
        self._spec = spec
        self._weights = weights
        self._projections = attention
        self._operators = operators
        self._groups = groups
        self._group = group
        self._epsilon = epsilon
        self._dtype = dtype
        self._attention = RelativeAttention(spec, weights.table, buffer)

    def allocate(self, tokens: int) -> RelativeScratch:
        spec, empty = self._spec, self._operators.empty
        assert spec.relative is not None
        return RelativeScratch(
            self._projections.allocate(tokens),
            states=empty(tokens, spec.num_heads * spec.relative.rank),
            attended=empty(tokens, spec.num_heads * spec.head_dim),
            out=empty(tokens, self._weights.output.shape[1]),
        )

    def allocate_states(self, slots: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Allocate the inputs of the three convolutions: [slots, conv_width - 1, channels] each."""
        weights = self._weights
        return tuple(
            factors.new_zeros((slots, len(factors) - 1, factors.shape[1]), dtype=self._dtype)
            for factors in (weights.keys, weights.values, weights.output)
        )

    def allocate_latents(self, num_blocks: int, block_size: int) -> Tensor:
        shape = (num_blocks, block_size, self._spec.page_width)
        return self._weights.table.new_zeros(shape, dtype=self._dtype)

    def project(
        self, rows: Tensor, scratch: RelativeScratch, rotations: Sequence[Rotation]
    ) -> None:
        self._projections.project_rotated(rows, scratch.attention, rotations)
        self._weights.states.into(rows, scratch.states)

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: RelativeScratch,
        kept: RelativeScratch | None = None,
    ) -> None:
        assert batch.states is not None
        assert self._spec.relative is not None
        weights, mine = self._weights, scratch.first(len(batch.token_ids))
        runs, own = self._groups.of(batch.states), mine.attention
        states = cache.states[self._layer]
        convolve_rows(own.keys, states[0], runs, weights.keys)
        convolve_rows(own.values, states[1], runs, weights.values)
        self._operators.norm_heads(own.rotated, self._spec.num_heads, weights.norms, self._epsilon)
        batch = batch.of_group(self._group)
        pages = cache.latents[self._layer]
        rows = torch.cat((own.keys.flatten(1), own.values.flatten(1)), dim=1)
        pages.flatten(0, 1)[batch.slots] = rows
        factors = mine.states.view(-1, self._spec.num_heads, self._spec.relative.rank)
        self._attention.attend(own.queries, factors, pages, batch, mine.attended)
        self._operators.arrange(mine.attended, own.attended)
        self._projections.into(own, mine.out)
        convolve_rows(mine.out, states[2], runs, weights.output)
        if kept is not None:
            outputs = batch.output_rows
            self._operators.keep(mine.out, None if outputs is None else outputs.indices)

    def into(self, scratch: RelativeScratch, out: Tensor) -> None:
        out.copy_(scratch.out)

    def add_to(self, scratch: RelativeScratch, hidden: Tensor) -> None:
        hidden += scratch.out
