"""Multi-head latent attention as a mixer: projections, norms and RoPE around its attention."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.attention import KVCache
from services.engine.model.mixers.indexer import Indexer, IndexScratch, IndexWeights
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.mixers.latent_attention import LatentAttention
from services.engine.model.mixers.latent_pages import LatentBuffer
from services.engine.model.mixers.token_choice import TokenChoice
from services.engine.model.operators.deltas import SequenceDelta
from services.engine.model.operators.interface import HeadNorms, Operators, Projection
from services.engine.model.operators.rotation import Rotation

__all__ = ["LatentMixer", "LatentScratch", "LatentShared", "LatentWeights"]


@dataclass(frozen=True, slots=True)
class LatentWeights:
    """Weights of one layer's latent attention."""

    query_vectors: Projection | None
    """Product that makes query vectors; None: queries are computed from the residual"""
    query_norm: Tensor | None
    """[query_width]; None if `query_vectors` is None"""
    queries: Projection
    """Product that makes the queries' own parts of all heads, then their shared parts"""
    latents: Projection
    """Product that makes the latent, then the keys' shared part"""
    latent_norm: Tensor
    """[latent_width]"""
    keys: Tensor
    """[heads, key_width, latent_width]"""
    values: Tensor
    """[heads, value_width, latent_width]"""
    expansion: SequenceDelta | None
    """Additions of adapters to keys and values, [tokens, heads * (key_width + value_width)]; None:
    adapters can't change them"""
    gate: Projection | None
    """Product that makes a gate for each head; None: outputs have no gate"""
    output: Projection
    index: IndexWeights | None
    """Weights of the indexer; None: the layer has none"""


class LatentShared:
    """Memory and chosen tokens that all layers of latent attention share."""

    def __init__(self) -> None:
        self.latents = LatentBuffer()
        self.index_keys = LatentBuffer()
        self.choice = TokenChoice()


@dataclass(frozen=True, slots=True)
class LatentScratch(Scratch):
    """Outputs of the projections, and the output of attention."""

    query_vectors: Tensor
    normed: Tensor
    """[tokens, query_width], norms of the query vectors in the layout that products read"""
    queries: Tensor
    """[tokens, heads * head_width], the own parts of all heads, then their shared parts"""
    shared_queries: Tensor
    """[tokens, heads, shared_width], a view of `queries`"""
    latents: Tensor
    """[tokens, absorbed_width], latents that the cache holds"""
    vectors: Tensor
    """[tokens, 1, latent_width], a view of `latents`"""
    shared_keys: Tensor
    """[tokens, 1, shared_width], a view of `latents`"""
    out: Tensor
    """[tokens, heads * value_width], row by row"""
    arranged: Tensor
    """[tokens, heads * value_width], in the layout that products read"""
    gates: Tensor
    """[tokens, heads], or width 0 if outputs have no gate"""
    index: IndexScratch | None
    """Buffers of the indexer; None: the layer has none"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        joined = self.query_vectors, self.normed, self.queries, self.latents, self.gates
        own = *joined, self.out, self.arranged
        return own if self.index is None else (*own, *self.index.tensors)


class LatentMixer(Mixer[LatentScratch]):
    """The latent attention of layer `layer`."""

    is_capturable = False  # torch's attention reads the lengths of contexts on the host

    def __init__(
        self,
        layer: int,
        spec: LatentSpec,
        weights: LatentWeights,
        rotation: int | None,
        operators: Operators,
        shared: LatentShared,
        group: int,
    ) -> None:
        """rotation: index among the step's rotations; None = no RoPE.

        group: number of the layer's cache group.
        """
        self.scratch_key = spec
        self._layer = layer
        self._spec = spec
        self._weights = weights
        self._rotation = rotation
        self._operators = operators
        self._group = group
        norm = weights.latent_norm
        self._norms = HeadNorms(norm, norm, centers=False)
        self._attention = LatentAttention(
            *(spec, weights.keys, weights.values, weights.expansion, operators),
            *(shared.latents, group),
        )
        self._choice = shared.choice
        self._indexer = None
        if weights.index is not None:
            self._indexer = Indexer(spec, weights.index, operators, shared.index_keys)

    def allocate(self, tokens: int) -> LatentScratch:
        spec, empty = self._spec, self._operators.empty
        vectors, normed = (empty(tokens, spec.query_width) for _ in range(2))
        out, arranged = (empty(tokens, spec.num_heads * spec.value_width) for _ in range(2))
        queries = empty(tokens, spec.num_heads * spec.head_width)
        latents = empty(tokens, spec.absorbed_width)
        shared = queries[:, spec.num_heads * spec.key_width :]
        return LatentScratch(
            query_vectors=vectors,
            normed=normed,
            queries=queries,
            shared_queries=shared.view(tokens, -1, spec.shared_width),
            latents=latents,
            vectors=latents[:, None, : spec.latent_width],
            shared_keys=latents[:, None, spec.latent_width :],
            out=out,
            arranged=arranged,
            gates=empty(tokens, spec.num_heads if spec.has_output_gate else 0),
            index=None if self._indexer is None else self._indexer.allocate(tokens),
        )

    def allocate_latents(self, num_blocks: int, block_size: int) -> Tensor:
        keys = self._weights.keys
        return keys.new_zeros(num_blocks, block_size, self._spec.page_width)

    def project(self, rows: Tensor, scratch: LatentScratch, rotations: Sequence[Rotation]) -> None:
        spec, weights, residual = self._spec, self._weights, rows
        rotation = None if self._rotation is None else rotations[self._rotation]
        weights.latents.into(rows, scratch.latents)
        if weights.gate is not None:
            weights.gate.into(rows, scratch.gates)
        if weights.query_vectors is not None and weights.query_norm is not None:
            weights.query_vectors.into(rows, scratch.query_vectors)
            norm, epsilon = weights.query_norm, spec.norm_epsilon
            self._operators.rms_norm(scratch.query_vectors, norm, epsilon, scratch.normed)
            rows = scratch.normed
        weights.queries.into(rows, scratch.queries)
        self._operators.norm_heads(scratch.vectors, 1, self._norms, spec.norm_epsilon)
        if rotation is not None:
            self._rotate(scratch.shared_queries, rotation)
            self._rotate(scratch.shared_keys, rotation)
            if rotation.query_scales is not None:
                scratch.queries.mul_(rotation.query_scales[:, None])
        if self._indexer is not None and scratch.index is not None:
            self._indexer.project(residual, rows, scratch.index, rotation)

    def _rotate(self, heads: Tensor, rotation: Rotation) -> None:
        self._operators.rotate(heads, heads.shape[1], rotation, None, None, 0.0)

    def _write(self, batch: StepBatch, cache: KVCache, scratch: LatentScratch) -> None:
        batch, pages = batch.of_group(self._group), cache.latents[self._layer]
        self._attention.write(scratch.latents, pages, batch)
        if scratch.index is not None:
            keys = pages.flatten(0, 1)[:, self._spec.absorbed_width :]
            keys[batch.slots] = scratch.index.keys[: len(batch.slots)]

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: LatentScratch,
        kept: LatentScratch | None = None,
    ) -> None:
        latents: Tensor | None = scratch.latents
        if scratch.index is not None:
            self._write(batch, cache, scratch)  # the indexer reads its keys before attention
            latents = None
        attending, batch, rows = scratch, batch.of_group(self._group), None
        if kept is not None:
            attending, outputs = kept, batch.output_rows
            rows = None if outputs is None else outputs.indices
            self._operators.keep(scratch.queries, rows)
            if self._spec.has_output_gate:
                self._operators.keep(scratch.gates, rows)
            if scratch.index is not None:
                scratch.index.keep(self._operators, rows)
            batch = batch.narrowed
        pages = cache.latents[self._layer]
        chosen = self._chosen(attending.index, pages, batch, rows)
        self._attention.attend(attending.queries, latents, pages, batch, attending.out, chosen)
        if self._spec.has_output_gate:
            heads = attending.out.view(*attending.gates.shape, -1)
            heads *= attending.gates.sigmoid()[..., None]
        self._operators.arrange(attending.out, attending.arranged)

    def _chosen(
        self, index: IndexScratch | None, pages: Tensor, batch: StepBatch, rows: Tensor | None
    ) -> Tensor | None:
        """Return the places of the attended tokens; None = all are attended.

        rows: int64 [n], rows of the step that are queries of the batch; None = all.
        """
        if not self._spec.attended_tokens:
            return None
        if self._indexer is None or index is None:
            return self._choice.of_rows(rows)
        self._choice.places = self._indexer.choose(index, pages, batch)
        return self._choice.places

    def into(self, scratch: LatentScratch, out: Tensor) -> None:
        self._weights.output.into(scratch.arranged, out)

    def add_to(self, scratch: LatentScratch, hidden: Tensor) -> None:
        self._weights.output.add_to(scratch.arranged, hidden)
