"""Attention as a mixer: projections, norms and RoPE around an attention backend."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from services.engine.batch.chunks import in_chunks
from services.engine.batch.step_batch import StepBatch
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.attention import AttentionBackend, AttentionStep, KVCache
from services.engine.model.checkpoint.family import QkNorm
from services.engine.model.mixers.interface import Mixer, Scratch
from services.engine.model.operators.interface import HeadNorms, Operators, Projection
from services.engine.model.operators.rotation import Rotation, UnrotatedHeads

__all__ = ["AttentionMixer", "AttentionScratch", "AttentionWeights"]


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Weights of one layer's attention. A weight that the layer lacks is None."""

    qkv: Projection
    query_norm: Tensor | None
    """RMSNorm that is computed with the rotation, before it"""
    key_norm: Tensor | None
    head_norms: HeadNorms | None
    """Norms that are computed apart from the rotation"""
    value_norm: HeadNorms | None
    sinks: Tensor | None
    """float32 [heads], one more logit in each head's softmax"""
    output: Projection
    slopes: Tensor | None = None
    """float32 [heads], slopes of ALiBi in decoders"""


@dataclass(frozen=True, slots=True)
class AttentionScratch(Scratch):
    """Output of the QKV projection, its heads, and the output of attention."""

    qkv: Tensor
    rotated: Tensor
    """Queries and keys together, [tokens, heads, head_dim]"""
    queries: Tensor
    """[tokens, heads, head_dim]"""
    keys: Tensor
    """[tokens, kv_heads, head_dim]"""
    values: Tensor
    """[tokens, kv_heads, value_dim]"""
    gates: Tensor
    """[tokens, gates], one for each head or for each of its outputs; of width 0: there are none"""
    attended: Tensor
    """[tokens, heads * value_dim], in the layout that products read"""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.qkv, self.attended


class AttentionMixer(Mixer[AttentionScratch]):
    """The attention of layer `layer`."""

    def __init__(
        self,
        layer: int,
        spec: AttentionSpec,
        weights: AttentionWeights,
        epsilon: float,
        rotation: int | None,
        operators: Operators,
        backend: AttentionBackend,
        group: int = 0,
    ) -> None:
        """epsilon: that of the norms; rotation: index among the step's rotations; None = no RoPE.

        group: number of the layer's cache group.
        """
        shape = (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.value_dim)
        is_reader = spec.reads_layer is not None
        self.scratch_key = ("attention", *shape, spec.num_gates, is_reader)
        self._layer = layer if spec.reads_layer is None else spec.reads_layer
        """Number of the layer whose keys and values it reads"""
        self._spec = spec
        self._weights = weights
        self._epsilon = epsilon
        self._rotation = rotation
        self._operators = operators
        self._backend = backend
        self._group = group
        self._rotates_with_write = self._can_rotate_with_write()
        """True if `mix` rotates the heads in the launch that writes keys and values"""
        self._unrotated: Rotation | None = None
        """Rotation of the heads that `project` has left to `mix`; None: they are rotated"""

    def _can_rotate_with_write(self) -> bool:
        """Return whether one kernel can rotate heads and write keys and values.

        Nothing but RoPE and norms of single heads may stand between the product and the write.
        """
        spec, norm = self._spec, self._weights.query_norm
        return (
            self._operators.rotates_into_pages
            and self._backend.has_pages
            and self._rotation is not None
            and spec.reads_layer is None
            and not self._norms_rotated
            and (norm is None or len(norm) == spec.head_dim)
        )

    @property
    def _norms_rotated(self) -> bool:
        """True if norms of heads follow the rotation."""
        return self._spec.qk_norm in (QkNorm.HEAD_ROTATED, QkNorm.HEAD_UNWEIGHTED)

    def allocate(self, tokens: int) -> AttentionScratch:
        spec, empty = self._spec, self._operators.empty
        is_reader = spec.reads_layer is not None
        cached = 0 if is_reader else spec.num_kv_heads
        num_rotated = spec.num_heads + cached
        attended = empty(tokens, spec.num_heads * spec.value_dim)
        widths = (
            spec.gate_heads * spec.head_dim,
            num_rotated * spec.head_dim,
            cached * spec.value_dim,
        )
        qkv = empty(tokens, sum(widths))
        gates, heads, values = qkv.split_with_sizes(widths, dim=1)
        rotated = heads.view(tokens, num_rotated, spec.head_dim)
        queries, keys = rotated.split_with_sizes((spec.num_heads, cached), dim=1)
        values = values.view(tokens, cached, spec.value_dim)
        gates = gates[:, : spec.num_gates]
        if is_reader:  # no token has keys to write
            keys = qkv.new_empty(0, spec.num_kv_heads, spec.head_dim)
            values = qkv.new_empty(0, spec.num_kv_heads, spec.value_dim)
        return AttentionScratch(qkv, rotated, queries, keys, values, gates, attended)

    def project(
        self, rows: Tensor, scratch: AttentionScratch, rotations: Sequence[Rotation]
    ) -> None:
        self._unrotated = None
        if self._rotates_with_write:
            assert self._rotation is not None
            self._unrotated = rotations[self._rotation]
            self._project(rows, scratch)
            self._norm_values(scratch)
        else:
            self.project_rotated(rows, scratch, rotations)

    def project_rotated(
        self, rows: Tensor, scratch: AttentionScratch, rotations: Sequence[Rotation]
    ) -> None:
        """Do `project` for a mixer that does not call `mix`: leave nothing to it."""
        self._project(rows, scratch)
        if self._rotation is not None:
            rotation = rotations[self._rotation]
            self._operators.rotate(
                scratch.rotated,
                self._spec.num_heads,
                rotation,
                self._weights.query_norm,
                self._weights.key_norm,
                self._epsilon,
            )
            _scale_queries(scratch, rotation)
        if self._norms_rotated:
            self._norm_heads(scratch)
        self._norm_values(scratch)

    def _project(self, rows: Tensor, scratch: AttentionScratch) -> None:
        """Compute queries, keys and values up to the rotation."""
        self._weights.qkv.into(rows, scratch.qkv)
        if self._spec.clip:
            self._operators.clip(scratch.qkv, self._spec.clip)
        if not self._norms_rotated:
            self._norm_heads(scratch)

    def _norm_values(self, scratch: AttentionScratch) -> None:
        if self._weights.value_norm is not None:
            heads, norm = self._spec.num_kv_heads, self._weights.value_norm
            self._operators.norm_heads(scratch.values, heads, norm, self._epsilon)

    def _norm_heads(self, scratch: AttentionScratch) -> None:
        norms = self._weights.head_norms
        if norms is not None:
            heads, queries = scratch.rotated, self._spec.num_heads
            self._operators.norm_heads(heads, queries, norms, self._epsilon)

    def mix(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: AttentionScratch,
        kept: AttentionScratch | None = None,
    ) -> None:
        attending, batch = scratch, batch.of_group(self._group)
        if self._unrotated is not None:
            self._write_rotated(batch, cache, scratch, self._unrotated)
        if kept is not None:
            attending, outputs = kept, batch.output_rows
            rows = None if outputs is None else outputs.indices
            self._operators.keep(scratch.queries, rows)
            if self._spec.gate is not None:
                self._operators.keep(scratch.gates, rows)
            batch = batch.narrowed
        if self._spec.is_chunked and not self._backend.sees_chunks:
            batch = in_chunks(batch, self._spec.window, cache.block_size)
        step = self._step(batch, cache, scratch, attending)
        self._backend.attend(self._layer, step)
        if self._spec.gate is not None:
            function = self._spec.gate.function
            self._operators.multiply_by_gates(attending.gates, function, attending.attended)

    def _write_rotated(
        self, batch: StepBatch, cache: KVCache, scratch: AttentionScratch, rotation: Rotation
    ) -> None:
        heads = UnrotatedHeads(
            scratch.rotated,
            scratch.values,
            rotation,
            self._weights.query_norm,
            self._weights.key_norm,
            self._epsilon,
        )
        pages = self._backend.pages(self._layer, cache)
        self._operators.rotate_into_pages(heads, *pages, batch.slots)
        _scale_queries(scratch, rotation)

    def into(self, scratch: AttentionScratch, out: Tensor) -> None:
        self._weights.output.into(scratch.attended, out)

    def add_to(self, scratch: AttentionScratch, hidden: Tensor) -> None:
        self._weights.output.add_to(scratch.attended, hidden)

    def _step(
        self,
        batch: StepBatch,
        cache: KVCache,
        scratch: AttentionScratch,
        attending: AttentionScratch,
    ) -> AttentionStep:
        """Return the step in which queries of `attending` see the keys and values of `scratch`."""
        return AttentionStep(
            cache_group=self._group,
            queries=attending.queries,
            keys=scratch.keys,
            values=scratch.values,
            batch=batch,
            cache=cache,
            out=attending.attended,
            sinks=self._weights.sinks,
            slopes=self._weights.slopes,
            is_written=self._spec.reads_layer is not None or self._unrotated is not None,
        )


def _scale_queries(scratch: AttentionScratch, rotation: Rotation) -> None:
    if rotation.query_scales is not None:
        scratch.queries.mul_(rotation.query_scales[:, None, None])
