"""Compressed attention as a mixer: projections, norms, RoPE and compression around attention."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.compressed_spec import CompressedSpec
from services.engine.model.attention import KVCache
from services.engine.model.mixers.compressed_attention import (
    QUERY_ROWS,
    CompressedAttention,
    IndexQueries,
)
from services.engine.model.mixers.compressed_pages import (
    ClosedEntries,
    closed_entries,
    entry_slots,
    token_slots,
)
from services.engine.model.mixers.compressor import Compressor, CompressorWeights
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.mixers.interleaved import rotate
from services.engine.model.mixers.latent_pages import PIECE
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.rotation import Rotary, Rotation

__all__ = ["CompressedMixer", "CompressedScratch", "CompressedWeights", "EntryIndexWeights"]


@dataclass(frozen=True, slots=True)
class EntryIndexWeights:
    """Weights of one layer's indexer."""

    queries: Projection
    """Product that makes queries from the vector that the layer's queries are made of"""
    head_weights: Projection
    """Product that makes each head's factor from the residual"""
    tokens: Projection
    """Product that makes the vectors of index keys from the residual, then their scores"""
    compressor: CompressorWeights


@dataclass(frozen=True, slots=True)
class CompressedWeights:
    """Weights of one layer's compressed attention."""

    query_vectors: Projection
    query_norm: Tensor
    """[query_width]"""
    queries: Projection
    keys: Projection
    """Product that makes the vector that is key and value from the residual"""
    key_norm: Tensor
    """[head_dim]"""
    sinks: Tensor
    """float32 [heads], one more logit in each head's softmax"""
    tokens: Projection | None
    """Product that makes entries' vectors from the residual, then their scores; None: there are no
    entries"""
    compressor: CompressorWeights | None
    index: EntryIndexWeights | None
    """Weights of the indexer; None: all entries are attended to"""
    groups: Tensor
    """[groups, group_width, heads of a group * head_dim]"""
    output: Projection


@dataclass(frozen=True, slots=True)
class CompressedScratch(Scratch):
    """Outputs of the projections, and the output of attention."""

    query_vectors: Tensor
    normed: Tensor
    """[tokens, query_width], norms of the query vectors in the layout that products read"""
    queries: Tensor
    """[tokens, heads * head_dim]"""
    keys: Tensor
    """[tokens, head_dim]"""
    out: Tensor
    """[tokens, heads * head_dim]"""
    arranged: Tensor
    """[tokens, groups * group_width], in the layout that products read"""
    compressed: Tensor | None
    """[tokens, compressed_width]"""
    index_tokens: Tensor | None
    """[tokens, index_width]"""
    index_queries: Tensor | None
    """[tokens, heads * width], the indexer's queries"""
    head_weights: Tensor | None
    """float32 [tokens, heads], the indexer's factors"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        own = self.query_vectors, self.normed, self.queries, self.keys, self.out, self.arranged
        index = self.index_tokens, self.index_queries, self.head_weights
        every = (*own, self.compressed, *index)
        return tuple(tensor for tensor in every if tensor is not None)


class CompressedMixer(Mixer[CompressedScratch]):
    """The compressed attention of layer `layer`.

    The pages of tokens hold keys and the vectors of entries, so that a step may end anywhere: the
    step with an entry's last token computes the entry from the pages.
    """

    is_capturable = False  # torch's attention reads the lengths of contexts on the host

    def __init__(
        self,
        layer: int,
        spec: CompressedSpec,
        weights: CompressedWeights,
        rotation: int,
        rotary: Rotary,
        operators: Operators,
        group: int,
    ) -> None:
        """rotation: index among the step's rotations; rotary: computes rotations of any positions.

        group: number of the cache group of tokens; entries are in the first one.
        """
        self.scratch_key = spec
        self._layer = layer
        self._spec = spec
        self._weights = weights
        self._rotation = rotation
        self._operators = operators
        self._group = group
        self._attention = CompressedAttention(spec, weights.sinks, rotary)
        self._compressors: list[tuple[Compressor, slice, slice]] = []
        """Compressors, each with its columns in pages of tokens and in pages of entries"""
        width, epsilon = spec.head_dim, spec.norm_epsilon
        if spec.compression is not None and weights.compressor is not None:
            read = slice(width, width + spec.compressed_width)
            made = Compressor(spec.compression, width, weights.compressor, rotary, epsilon)
            self._compressors.append((made, read, slice(0, width)))
            index = spec.compression.index
            if index is not None and weights.index is not None:
                mine = weights.index.compressor
                made = Compressor(spec.compression, index.width, mine, rotary, epsilon)
                written = slice(width, spec.entry_width)
                self._compressors.append((made, slice(read.stop, spec.page_width), written))

    def allocate(self, tokens: int) -> CompressedScratch:
        spec, empty = self._spec, self._operators.empty
        vectors, normed = (empty(tokens, spec.query_width) for _ in range(2))
        queries, out = (empty(tokens, spec.num_heads * spec.head_dim) for _ in range(2))
        keys = empty(tokens, spec.head_dim)
        arranged = empty(tokens, spec.groups * spec.group_width)
        compressed = index_tokens = index_queries = factors = None
        if spec.compression is not None:
            compressed = empty(tokens, spec.compressed_width)
            index = spec.compression.index
            if index is not None:
                index_tokens = empty(tokens, spec.index_width)
                index_queries = empty(tokens, index.num_heads * index.width)
                factors = keys.new_empty((tokens, index.num_heads), dtype=torch.float32)
        return CompressedScratch(
            vectors,
            normed,
            queries,
            keys,
            out,
            arranged,
            compressed,
            index_tokens,
            index_queries,
            factors,
        )

    def allocate_latents(self, num_blocks: int, block_size: int) -> Tensor:
        norm = self._weights.key_norm
        return norm.new_zeros(num_blocks, block_size, self._spec.page_width)

    def allocate_entries(self, num_blocks: int, block_size: int) -> Tensor:
        spec, norm = self._spec, self._weights.key_norm
        return norm.new_zeros(num_blocks, spec.entries_in(block_size), spec.entry_width)

    def project(
        self, rows: Tensor, scratch: CompressedScratch, rotations: Sequence[Rotation]
    ) -> None:
        spec, weights, rotation = self._spec, self._weights, rotations[self._rotation]
        weights.query_vectors.into(rows, scratch.query_vectors)
        epsilon = spec.norm_epsilon
        self._operators.rms_norm(scratch.query_vectors, weights.query_norm, epsilon, scratch.normed)
        weights.queries.into(scratch.normed, scratch.queries)
        self._norm_queries(self._by_head(scratch.queries), rotation)
        weights.keys.into(rows, scratch.keys)
        scratch.keys.copy_(rms_norm(scratch.keys, (spec.head_dim,), weights.key_norm, epsilon))
        rotate(scratch.keys[:, None], rotation)
        if weights.tokens is not None and scratch.compressed is not None:
            weights.tokens.into(rows, scratch.compressed)
        if weights.index is not None:
            self._project_index(weights.index, rows, scratch, rotation)

    def _norm_queries(self, queries: Tensor, rotation: Rotation) -> None:
        """Norm and rotate queries in place, some rows at a time."""
        for first in range(0, len(queries), QUERY_ROWS):
            rows = slice(first, first + QUERY_ROWS)
            some = queries[rows]
            some.copy_(rms_norm(some, (self._spec.head_dim,), None, self._spec.norm_epsilon))
            rotate(some, Rotation(rotation.cosines[rows], rotation.sines[rows]))

    def _project_index(
        self,
        weights: EntryIndexWeights,
        rows: Tensor,
        scratch: CompressedScratch,
        rotation: Rotation,
    ) -> None:
        tokens, factors = scratch.index_tokens, scratch.head_weights
        assert tokens is not None
        assert factors is not None
        assert scratch.index_queries is not None
        weights.tokens.into(rows, tokens)
        weights.head_weights.into(rows, factors)
        weights.queries.into(scratch.normed, scratch.index_queries)
        heads = factors.shape[1]
        rotate(scratch.index_queries.view(len(rows), heads, -1), rotation)

    def _write(self, batch: StepBatch, cache: KVCache, scratch: CompressedScratch) -> None:
        slots = batch.of_group(self._group).slots
        pages, start = cache.latents[self._layer].flatten(0, 1), 0
        for part in (scratch.keys, scratch.compressed, scratch.index_tokens):
            if part is not None:
                pages[:, start : start + part.shape[1]][slots] = part[: len(slots)]
                start += part.shape[1]

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: CompressedScratch,
        kept: CompressedScratch | None = None,
    ) -> None:
        self._write(batch, cache, scratch)
        self._write_entries(batch, cache)
        batches, attending = (batch, batch.of_group(self._group)), scratch
        if kept is not None:
            rows = None if batch.output_rows is None else batch.output_rows.indices
            for tensor in (scratch.queries, scratch.index_queries, scratch.head_weights):
                if tensor is not None:
                    self._operators.keep(tensor, rows)
            batches, attending = (batches[0].narrowed, batches[1].narrowed), kept
        index = None
        if attending.index_queries is not None and attending.head_weights is not None:
            heads = attending.head_weights.shape[1]
            queries = attending.index_queries.view(len(attending.head_weights), heads, -1)
            index = IndexQueries(queries, attending.head_weights)
        out = self._by_head(attending.out)
        pages = cache.latents[self._layer], cache.entries.get(self._layer)
        self._attention.attend(self._by_head(attending.queries), index, batches, pages, out)
        self._operators.arrange(self._grouped(attending.out), attending.arranged)

    def _write_entries(self, batch: StepBatch, cache: KVCache) -> None:
        """Compute the entries whose last tokens are in the step, from the pages."""
        spec = self._spec.compression
        if spec is None:
            return
        tokens, entries = cache.latents[self._layer], cache.entries[self._layer]
        at_once = max(1, PIECE // (4 * spec.tokens * self._spec.compressed_width))
        for closed in closed_entries(batch, spec.rate).pieces(at_once):
            self._write_some(closed, batch, tokens, entries)

    def _write_some(
        self, closed: ClosedEntries, batch: StepBatch, tokens: Tensor, entries: Tensor
    ) -> None:
        spec, size = self._spec.compression, tokens.shape[1]
        assert spec is not None
        ends = closed.ends[:, None]
        places = ends + torch.arange(1 - spec.tokens, 1, device=ends.device)
        tables = batch.of_group(self._group).block_tables[closed.sequences]
        read = token_slots(tables, places.clamp(min=0), size)
        written = entry_slots(batch.block_tables[closed.sequences], ends, size, spec.rate)[:, 0]
        for compressor, source, target in self._compressors:
            found = tokens.flatten(0, 1)[:, source][read]
            made = compressor.compress(found, closed.ends + 1 - spec.rate)
            entries.flatten(0, 1)[:, target][written] = made

    def _grouped(self, out: Tensor) -> Tensor:
        """Return the products of each group's outputs, [rows, groups * group_width]."""
        groups = self._weights.groups
        by_group = out.view(len(out), len(groups), -1).transpose(0, 1)
        return torch.bmm(by_group, groups.mT).transpose(0, 1).flatten(1)

    def _by_head(self, rows: Tensor) -> Tensor:
        """View rows [n, width] as [n, heads, head_dim]."""
        return rows.view(len(rows), self._spec.num_heads, -1)

    def into(self, scratch: CompressedScratch, out: Tensor) -> None:
        self._weights.output.into(scratch.arranged, out)

    def add_to(self, scratch: CompressedScratch, hidden: Tensor) -> None:
        self._weights.output.add_to(scratch.arranged, hidden)
