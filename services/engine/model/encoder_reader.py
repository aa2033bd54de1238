"""Loading of an encoder's weights."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, linear

from services.engine.model.architecture.disentangled import DisentangledSpec
from services.engine.model.architecture.distance import NUM_BUCKETS, distance_buckets
from services.engine.model.architecture.layers import AttentionSpec, DenseSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention.pair_scores import (
    DisentangledScores,
    DistanceKeys,
    DistanceScores,
)
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.tensors import StoredTensor, TensorFiles
from services.engine.model.decoder import LayerWeights
from services.engine.model.embedding import TensorEmbedding
from services.engine.model.encoder import EncoderWeights
from services.engine.model.mixers.attention import AttentionWeights
from services.engine.model.operators.interface import LayerNorm, Operators, Projection
from services.engine.model.parts.feed_forward import Dense
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
"""Tensors of heads, and of buffers, that hidden states don't need"""


@dataclass(frozen=True, slots=True)
class _Linear:
    """Linear layers of one input: weights, and as many biases or none."""

    weights: tuple[StoredTensor, ...]
    biases: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: StoredTensor
    bias: StoredTensor | None


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: _Norm | None
    qkv: _Linear
    output: _Linear
    feed_forward_norm: _Norm
    gate: _Linear
    down: _Linear


@dataclass(frozen=True, slots=True)
class _Distances:
    """Embeddings of distances, and their projections in each layer."""

    table: StoredTensor
    norm: _Norm | None
    keys: list[_Linear | None]
    queries: list[_Linear | None]


class EncoderReader:
    """Reader of one checkpoint's encoder."""

    def __init__(
        self,
        checkpoint: TensorFiles,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        operators: Operators,
        *,
        shows_progress: bool,
    ) -> None:
        names, traits = spec.family.names, spec.family.encoder
        assert traits is not None
        self._checkpoint = checkpoint
        self._spec = spec
        self._traits = traits
        self._dtype = dtype
        self._device = device
        self._operators = operators
        self._shows_progress = shows_progress
        self._wanted: list[StoredTensor] = []
        held = (r for r in names.roots if checkpoint.holds(f"{r}{names.embedding}.weight"))
        self._root = next(held, next(iter(names.roots)))
        self._step_bytes = 0

    def read(self) -> EncoderWeights:
        """Read all weights. Raises CheckpointError if one is missing or of another shape."""
        spec, names, traits = self._spec, self._spec.family.names, self._traits
        width = spec.hidden_size
        table = self._stored(f"{names.embedding}.weight", spec.vocab_size, width)
        positions = token_types = None
        if names.positions is not None:
            count = spec.context_length + spec.position_offset
            positions = self._stored(f"{names.positions}.weight", count, width)
        if traits.token_types is not None and spec.num_token_types:
            name = f"{traits.token_types}.weight"
            token_types = self._stored(name, spec.num_token_types, width)
        embedding_norm = self._norm(traits.embedding_norm)
        layers = [self._layer(index) for index in range(spec.num_layers)]
        last_norm = self._norm(names.final_norm) if traits.norms_first else None
        bias = distances = None
        if traits.attention_bias is not None:
            name = f"{traits.attention_bias}.weight"
            bias = self._stored(name, NUM_BUCKETS, spec.attention(0).num_heads)
        if spec.disentangled is not None:
            distances = self._distances(spec.disentangled)
        total = self._checkpoint.require(self._wanted, _OTHER_TASKS)
        self._bar = LoadProgress(total, shown=self._shows_progress)
        try:
            return EncoderWeights(
                embedding=TensorEmbedding(self._table(table)),
                positions=None if positions is None else self._table(positions),
                layers=tuple(map(self._read_layer, layers)),
                final_norm=None,
                output=None,
                device=self._device,
                layer_inputs=None,
                tokens=None,
                token_types=None if token_types is None else self._table(token_types),
                embedding_norm=self._read_norm(embedding_norm),
                norms=tuple(
                    (
                        None
                        if each.attention_norm is None
                        else self._read_norm(each.attention_norm),
                        self._read_norm(each.feed_forward_norm),
                    )
                    for each in layers
                ),
                last_norm=None if last_norm is None else self._read_norm(last_norm),
                pair_scores=self._read_pair_scores(bias, distances),
                step_bytes=self._step_bytes,
            )
        finally:
            self._bar.finish()

    # Names and shapes.

    def _layer(self, index: int) -> _Layer:
        spec, names = self._spec, self._spec.family.names
        prefix = f"{names.layers}.{index}."
        width, attention, content = spec.hidden_size, *_uniform(spec)
        heads, inner = attention.num_heads * attention.head_dim, content.width
        assert names.attention_norm is not None
        assert names.feed_forward_norm is not None
        # ModernBERT's first layer reads the norm of the embeddings
        is_normed = not self._traits.norms_first or index > 0
        held = self._checkpoint.holds(f"{self._root}{prefix}{names.down}.bias")
        return _Layer(
            attention_norm=self._norm(f"{prefix}{names.attention_norm}") if is_normed else None,
            qkv=self._linear(prefix, names.qkv, (heads,) * 3, width, attention.qkv_bias),
            output=self._linear(prefix, (names.output,), (width,), heads, attention.output_bias),
            feed_forward_norm=self._norm(f"{prefix}{names.feed_forward_norm}"),
            gate=self._linear(
                prefix,
                names.gate,
                (inner, inner) if content.activation.gated else (inner,),
                width,
                content.has_bias,
            ),
            down=self._linear(prefix, (names.down,), (width,), inner, content.has_bias or held),
        )

    def _distances(self, shape: DisentangledSpec) -> _Distances:
        """Name DeBERTa's embeddings of distances, and what projects them in each layer."""
        spec = self._spec
        table = self._stored("encoder.rel_embeddings.weight", 2 * shape.span, spec.hidden_size)
        norm = self._norm("encoder.LayerNorm") if shape.has_norm else None
        shared = shape.shares_projections
        key, query = ("key_proj", "query_proj") if shared else ("pos_key_proj", "pos_query_proj")
        return _Distances(
            table,
            norm,
            self._projections(key, spec.num_layers if shape.reads_keys else 0),
            self._projections(query, spec.num_layers if shape.reads_queries else 0),
        )

    def _projections(self, name: str, count: int) -> list[_Linear | None]:
        """Name a projection of distances in the first `count` layers."""
        spec, names = self._spec, self._spec.family.names
        width = spec.hidden_size
        prefixes = [f"{names.layers}.{index}.attention.self." for index in range(count)]
        layers = [self._linear(prefix, (name,), (width,), width, True) for prefix in prefixes]
        return [*layers, *[None] * (spec.num_layers - count)]

    def _linear(
        self,
        prefix: str,
        names: tuple[str, ...],
        outputs: tuple[int, ...],
        inputs: int,
        has_bias: bool,
    ) -> _Linear:
        """Name a tensor for each of `outputs`, or a single one for all."""
        if len(names) == 1:
            outputs = (sum(outputs),)
        pairs = list(zip(names, outputs, strict=True))
        return _Linear(
            tuple(self._stored(f"{prefix}{name}.weight", out, inputs) for name, out in pairs),
            tuple(self._stored(f"{prefix}{name}.bias", out) for name, out in pairs if has_bias),
        )

    def _norm(self, name: str) -> _Norm:
        width = self._spec.hidden_size
        has_bias = self._checkpoint.holds(f"{self._root}{name}.bias")
        bias = self._stored(f"{name}.bias", width) if has_bias else None
        return _Norm(self._stored(f"{name}.weight", width), bias)

    def _stored(self, name: str, *shape: int) -> StoredTensor:
        stored = StoredTensor(f"{self._root}{name}", shape)
        self._wanted.append(stored)
        return stored

    # Weights.

    def _read_layer(self, layer: _Layer) -> LayerWeights:
        activation = _uniform(self._spec)[1].activation
        gates, biases = self._read_linear(layer.gate)
        if activation.gated and len(gates) == 1:
            gates = list(gates[0].chunk(2))
            biases = [part for bias in biases for part in bias.chunk(2)]
            if self._traits.up_comes_first:
                gates, biases = gates[::-1], biases[::-1]
        gate, up = gates if len(gates) == 2 else (gates[0], None)
        gate_bias, up_bias = (*biases, None, None)[:2]
        made = self._operators.gate(gate, up, gate_bias, up_bias, activation)
        self._step_bytes += made.weight_bytes
        attention = AttentionWeights(
            qkv=self._projection(layer.qkv),
            query_norm=None,
            key_norm=None,
            head_norms=None,
            value_norm=None,
            sinks=None,
            output=self._projection(layer.output),
        )
        return LayerWeights(
            mixer_norm=None,
            mixer=attention,
            mixer_post_norm=None,
            feed_forward_norm=None,
            feed_forward=Dense(made, self._projection(layer.down)),
            residual=OneStream(self._operators),
        )

    def _projection(self, linear: _Linear) -> Projection:
        weights, biases = self._read_linear(linear)
        bias = torch.cat(biases) if biases else None
        projection = self._operators.projection(torch.cat(weights), bias)
        self._step_bytes += projection.weight_bytes
        return projection

    def _read_linear(self, linear: _Linear) -> tuple[list[Tensor], list[Tensor]]:
        return [self._tensor(each) for each in linear.weights], [
            self._tensor(each) for each in linear.biases
        ]

    def _read_norm(self, norm: _Norm) -> LayerNorm:
        weight = self._table(norm.weight).clone()
        bias = torch.zeros_like(weight) if norm.bias is None else self._table(norm.bias).clone()
        return LayerNorm(weight, bias)

    def _read_pair_scores(
        self, bias: StoredTensor | None, distances: _Distances | None
    ) -> DistanceScores | DisentangledScores | None:
        if bias is not None:
            return self._read_bias(bias)
        return None if distances is None else self._read_distances(distances)

    def _read_bias(self, stored: StoredTensor) -> DistanceScores:
        table = self._table(stored)
        most = self._spec.context_length - 1
        distances = torch.arange(-most, most + 1, device=self._device)
        return DistanceScores(table[distance_buckets(distances)].T.contiguous())

    def _read_distances(self, stored: _Distances) -> DisentangledScores:
        spec, shape = self._spec.attention(0), self._spec.disentangled
        assert shape is not None
        table = self._tensor(stored.table).float()
        if stored.norm is not None:
            norm = self._read_norm(stored.norm)
            weight, bias = norm.weight.cpu().float(), norm.bias.cpu().float()
            table = layer_norm(table, table.shape[1:], weight, bias, self._spec.norm_epsilon)

        def project(layer: _Linear | None) -> Tensor | None:
            if layer is None:
                return None
            [weight], [bias] = self._read_linear(layer)
            rows = linear(table, weight.float(), bias.float())
            heads = rows.view(-1, spec.num_heads, spec.head_dim).transpose(0, 1)
            return heads.to(self._device, self._dtype).contiguous()

        pairs = zip(stored.keys, stored.queries, strict=True)
        return DisentangledScores(
            shape, [DistanceKeys(project(keys), project(queries)) for keys, queries in pairs]
        )

    def _table(self, stored: StoredTensor) -> Tensor:
        return self._tensor(stored).to(self._device, self._dtype)

    def _tensor(self, stored: StoredTensor) -> Tensor:
        self._bar.add(self._checkpoint.num_bytes(stored))
        return self._checkpoint.tensor(stored)


def _uniform(spec: ModelSpec) -> tuple[AttentionSpec, DenseSpec]:
    """Return the shapes that all layers of an encoder have."""
    content = spec.layers[0].feed_forward
    assert isinstance(content, DenseSpec)
    return spec.attention(0), content
