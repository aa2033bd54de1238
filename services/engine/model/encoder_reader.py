"""Loading of an encoder's weights."""

from collections.abc import Iterator

import torch
from torch import Tensor

from services.engine.model.adapters.adapters import Adapters, Site, SiteModule
from services.engine.model.architecture.activation import Activation
from services.engine.model.architecture.layers import DenseSpec, ExpertsSpec, LayerSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.tensors import StoredTensor, TensorFiles
from services.engine.model.embedding import TensorEmbedding
from services.engine.model.encoder import EncoderWeights
from services.engine.model.encoder_manifest import (
    EncoderManifest,
    StoredEncoderExperts,
    StoredEncoderLayer,
    StoredMlp,
)
from services.engine.model.layer_stack import LayerWeights
from services.engine.model.mixers.attention import AttentionWeights
from services.engine.model.operators.composed_projections import AdaptedProjection
from services.engine.model.operators.deltas import TableDelta
from services.engine.model.operators.interface import (
    ExpertWeights,
    LayerNorm,
    Operators,
    Projection,
)
from services.engine.model.pair_scores_reader import read_pair_scores
from services.engine.model.parts.feed_forward import BiasedOutput, Dense, Experts, FeedForward
from services.engine.model.parts.stored import StoredLinear, StoredNorm
from services.engine.model.residual import OneStream

__all__ = ["EncoderReader"]

_OTHER_TASKS = (
    "*pooler.*",
    "*position_ids",
    "*.inv_freq",
    "classifier.*",
    "cls.*",
    "deberta.embeddings.position_embeddings.*",
    "decoder.*",
    "head.*",
    "linear.weight",
    "lm_head.*",
    "lm_predictions.*",
    "mask_predictions.*",
    "pre_classifier.*",
    "qa_outputs.*",
    "vocab_*",
)
"""Patterns of tensors of heads and buffers, which hidden states don't need"""


class EncoderReader:
    """Reader of one checkpoint's encoder."""

    def __init__(
        self,
        checkpoint: TensorFiles,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        operators: Operators,
        adapters: Adapters | None = None,
        *,
        shows_progress: bool,
    ) -> None:
        """adapters: adapters that may change the layers' products; None: none can."""
        assert spec.family.encoder is not None
        self._checkpoint = checkpoint
        self._spec = spec
        self._up_comes_first = spec.family.encoder.up_comes_first
        self._dtype = dtype
        self._device = device
        self._operators = operators
        self._adapters = adapters
        self._root = ""
        self._shows_progress = shows_progress
        self._step_bytes = 0

    def read(self) -> EncoderWeights:
        """Read all weights. Raises CheckpointError if one is missing or of another shape."""
        manifest = EncoderManifest.of(self._spec, self._checkpoint)
        total = self._checkpoint.require(manifest.tensors(), _OTHER_TASKS)
        self._bar = LoadProgress(total, shown=self._shows_progress)
        try:
            return self._read(manifest)
        finally:
            self._bar.finish()

    def _read(self, manifest: EncoderManifest) -> EncoderWeights:
        self._root = manifest.root
        norms = [(each.attention_norm, each.feed_forward_norm) for each in manifest.layers]
        return EncoderWeights(
            embedding=TensorEmbedding(self._table(manifest.embedding)),
            positions=None if manifest.positions is None else self._table(manifest.positions),
            layers=tuple(map(self._layer, manifest.layers, self._spec.layers)),
            device=self._device,
            token_types=None if manifest.token_types is None else self._table(manifest.token_types),
            embedding_norm=self._norm(manifest.embedding_norm),
            norms=tuple(
                (None if first is None else self._norm(first), self._norm(second))
                for first, second in norms
            ),
            table_deltas=self._table_deltas(manifest),
            last_norm=None if manifest.last_norm is None else self._norm(manifest.last_norm),
            pair_scores=read_pair_scores(
                self._spec, manifest, self._tensor, self._device, self._dtype
            ),
            step_bytes=self._step_bytes,
        )

    def _layer(self, stored: StoredEncoderLayer, spec: LayerSpec) -> LayerWeights:
        attention = AttentionWeights(
            qkv=self._projection(stored.qkv),
            query_norm=None,
            key_norm=None,
            head_norms=None,
            value_norm=None,
            sinks=None,
            output=self._projection(stored.output),
        )
        content = spec.feed_forward
        if isinstance(stored.feed_forward, StoredMlp):
            assert isinstance(content, DenseSpec)
            feed_forward: FeedForward = self._dense(stored.feed_forward, content.activation)
        else:
            assert isinstance(content, ExpertsSpec)
            feed_forward = self._experts(stored.feed_forward, content)
        return LayerWeights(
            mixer_norm=None,
            mixer=attention,
            mixer_post_norm=None,
            feed_forward_norm=None,
            feed_forward=feed_forward,
            residual=OneStream(self._operators),
        )

    def _dense(self, stored: StoredMlp, activation: Activation) -> Dense:
        gate, up, gate_bias, up_bias = self._gate_parts(stored.gate, activation)
        made = self._operators.gate(gate, up, gate_bias, up_bias, activation)
        self._step_bytes += made.weight_bytes
        if self._adapters is not None:
            made.adapt(self._adapters.delta(self._site(*stored.gate.weights)))
        return Dense(made, self._projection(stored.down))

    def _experts(self, stored: StoredEncoderExperts, content: ExpertsSpec) -> FeedForward:
        [weight], _ = self._linear(stored.router)
        router = self._operators.exact_projection(weight, None)
        experts = self._stacked(stored, content) if stored.stacks else self._apart(stored, content)
        mixture = self._operators.mixture(
            experts, content.count, content.routing.per_token, content.activation
        )
        self._step_bytes += mixture.weight_bytes + router.weight_bytes
        layer = Experts(
            router=router,
            mixture=mixture,
            count=content.count,
            routing=content.routing,
            bias=None,
            operators=self._operators,
            routed=mixture.routed(router, content.routing, None, None),
        )
        if stored.output_bias is None:
            return layer
        return BiasedOutput(layer, self._table(stored.output_bias).clone())

    def _apart(self, stored: StoredEncoderExperts, content: ExpertsSpec) -> Iterator[ExpertWeights]:
        for expert in stored.experts:
            gate, up, gate_bias, up_bias = self._gate_parts(expert.gate, content.activation)
            [down], biases = self._linear(expert.down)
            yield ExpertWeights(gate, up, down, gate_bias, up_bias, next(iter(biases), None))

    def _stacked(
        self, stored: StoredEncoderExperts, content: ExpertsSpec
    ) -> Iterator[ExpertWeights]:
        shape = (content.count, content.width, -1)
        first, second = (self._tensor(each).view(shape) for each in stored.stacks)
        for gate, down in zip(first, second, strict=True):
            yield ExpertWeights(gate, None, down.T, None, None, None)

    def _gate_parts(
        self, stored: StoredLinear, activation: Activation
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Return gate and up of a layer, and their biases; up is None if it has no gate."""
        gates, biases = self._linear(stored)
        if activation.gated and len(gates) == 1:
            gates = list(gates[0].chunk(2))
            biases = [part for bias in biases for part in bias.chunk(2)]
            if self._up_comes_first:
                gates, biases = gates[::-1], biases[::-1]
        gate, up = gates if len(gates) == 2 else (gates[0], None)
        gate_bias, up_bias = (*biases, None, None)[:2]
        return gate, up, gate_bias, up_bias

    def _projection(self, stored: StoredLinear) -> Projection:
        weights, biases = self._linear(stored)
        bias = torch.cat(biases) if biases else None
        projection = self._operators.projection(torch.cat(weights), bias)
        self._step_bytes += projection.weight_bytes
        if self._adapters is None:
            return projection
        return AdaptedProjection(projection, self._adapters.delta(self._site(*stored.weights)))

    def _table_deltas(self, manifest: EncoderManifest) -> tuple[TableDelta | None, ...]:
        """Make what adapters add to the embeddings of tokens and of token types."""
        tables = [manifest.embedding, manifest.token_types]
        if self._adapters is None:
            return (None,) * len(tables)
        sites = [None if each is None else self._site(each, is_table=True) for each in tables]
        return tuple(None if site is None else self._adapters.of_table(site) for site in sites)

    def _site(self, *weights: StoredTensor, is_table: bool = False) -> Site:
        """Describe a product for adapters, or an embedding as one of one-hot rows."""
        names = [each.name.removeprefix(self._root).removesuffix(".weight") for each in weights]
        place = int(is_table)
        modules = [
            SiteModule(name, each.shape[place]) for name, each in zip(names, weights, strict=True)
        ]
        return Site(tuple(modules), weights[0].shape[1 - place])

    def _linear(self, stored: StoredLinear) -> tuple[list[Tensor], list[Tensor]]:
        """Return the weights and the biases of linear layers."""
        return [self._tensor(each) for each in stored.weights], [
            self._tensor(each) for each in stored.biases
        ]

    def _norm(self, norm: StoredNorm) -> LayerNorm:
        weight = self._table(norm.weight).clone()
        bias = torch.zeros_like(weight) if norm.bias is None else self._table(norm.bias).clone()
        return LayerNorm(weight, bias)

    def _table(self, stored: StoredTensor) -> Tensor:
        return self._tensor(stored).to(self._device, self._dtype)

    def _tensor(self, stored: StoredTensor) -> Tensor:
        self._bar.add(self._checkpoint.num_bytes(stored))
        return self._checkpoint.tensor(stored)
