"""Tensors that a checkpoint must hold, by name, shape and role."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint import mxfp4
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.families import ExpertTensorNames, QkNorm
from services.engine.model.checkpoint.tensors import StoredTensor

__all__ = [
    "Manifest",
    "StackedExperts",
    "StoredExperts",
    "StoredFeedForward",
    "StoredLayer",
    "StoredLinear",
    "StoredNorm",
]


@dataclass(frozen=True, slots=True)
class StoredLinear:
    """One or more linear layers of the same input: their weights and either all biases or none."""

    weights: tuple[StoredTensor, ...]
    biases: tuple[StoredTensor, ...]


@dataclass(frozen=True, slots=True)
class StoredNorm:
    weight: StoredTensor
    bias: StoredTensor | None


@dataclass(frozen=True, slots=True)
class StoredFeedForward:
    gate: StoredLinear
    """Both products of a gated layer, or the only one"""
    down: StoredLinear


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """All experts of a layer: floating-point weights, or MXFP4 blocks and their scales.

    Floating-point weights are [experts, inputs, outputs], MXFP4 weights [experts, outputs, inputs].
    Outputs of the gate's two products alternate.
    """

    gate: tuple[StoredTensor, ...]
    gate_bias: StoredTensor
    down: tuple[StoredTensor, ...]
    down_bias: StoredTensor


@dataclass(frozen=True, slots=True)
class StoredExperts:
    prefix: str
    """Beginning of the names in this layer"""
    router: StoredLinear
    experts: tuple[StoredFeedForward, ...] | StackedExperts


@dataclass(frozen=True, slots=True)
class StoredLayer:
    attention_norm: StoredNorm | None
    qkv: StoredLinear
    query_norm: StoredTensor | None
    key_norm: StoredTensor | None
    sinks: StoredTensor | None
    output: StoredLinear
    attention_post_norm: StoredNorm | None
    feed_forward_norm: StoredNorm | None
    feed_forward: StoredFeedForward | StoredExperts
    feed_forward_post_norm: StoredNorm | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every tensor of a checkpoint."""

    root: str
    """Beginning of the decoder's tensor names"""
    embedding: StoredTensor
    positions: StoredTensor | None
    layers: tuple[StoredLayer, ...]
    final_norm: StoredNorm
    head: StoredTensor | None
    """None: the embedding serves as output projection"""

    @staticmethod
    def of(spec: ModelSpec, root: str) -> "Manifest":
        """List the tensors of `spec`, whose names begin with `root`, one of its family's roots."""
        names = spec.family.names
        positions = None
        if names.positions is not None:
            shape = (spec.context_length, spec.hidden_size)
            positions = StoredTensor(f"{root}{names.positions}.weight", shape)
        table = (spec.vocab_size, spec.hidden_size)
        return Manifest(
            root=root,
            embedding=StoredTensor(f"{root}{names.embedding}.weight", table),
            positions=positions,
            layers=tuple(
                _LayerNamer(spec, f"{root}{names.layers}.{index}.").layer(index)
                for index in range(spec.num_layers)
            ),
            final_norm=_norm(spec, f"{root}{names.final_norm}"),
            head=None
            if spec.tied_embeddings
            else StoredTensor(f"{names.roots[root]}.weight", table),
        )

    def tensors(self) -> Iterator[StoredTensor]:
        return _tensors(self)


class _LayerNamer:
    """Builder of one layer's names and shapes."""

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        self._spec = spec
        self._prefix = prefix

    def layer(self, index: int) -> StoredLayer:
        spec, names = self._spec, self._spec.family.names
        hidden = spec.hidden_size
        attended, cached = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        has_experts = spec.experts is not None and spec.experts.layers[index]
        return StoredLayer(
            attention_norm=self._norm(names.attention_norm),
            qkv=self._linear(names.qkv, (attended, cached, cached), hidden, spec.qkv_bias),
            query_norm=self._qk_norm(names.query_norm, attended),
            key_norm=self._qk_norm(names.key_norm, cached),
            sinks=None
            if names.sinks is None
            else StoredTensor(f"{self._prefix}{names.sinks}", (spec.num_heads,)),
            output=self._linear((names.output,), (hidden,), attended, spec.output_bias),
            attention_post_norm=self._norm(names.attention_post_norm),
            feed_forward_norm=self._norm(names.feed_forward_norm),
            feed_forward=self._experts()
            if has_experts
            else self._feed_forward(names.gate, names.down, spec.intermediate_size),
            feed_forward_post_norm=self._norm(names.feed_forward_post_norm),
        )

    def _norm(self, name: str | None) -> StoredNorm | None:
        return None if name is None else _norm(self._spec, f"{self._prefix}{name}")

    def _qk_norm(self, name: str, width: int) -> StoredTensor | None:
        kind = self._spec.family.qk_norm
        if kind is QkNorm.NONE:
            return None
        shape = self._spec.head_dim if kind is QkNorm.HEAD else width
        return StoredTensor(f"{self._prefix}{name}.weight", (shape,))

    def _linear(
        self, names: tuple[str, ...], outputs: tuple[int, ...], inputs: int, bias: bool
    ) -> StoredLinear:
        """Name a tensor for each of `outputs`, or a single one for all."""
        if len(names) == 1:
            outputs = (sum(outputs),)
        weights, biases = [], []
        for name, count in zip(names, outputs, strict=True):
            shape = (inputs, count) if self._spec.family.transposed else (count, inputs)
            weights.append(StoredTensor(f"{self._prefix}{name}.weight", shape))
            biases.append(StoredTensor(f"{self._prefix}{name}.bias", (count,)))
        return StoredLinear(tuple(weights), tuple(biases) if bias else ())

    def _feed_forward(self, gate: tuple[str, ...], down: str, width: int) -> StoredFeedForward:
        spec = self._spec
        widths = (width, width) if spec.activation.gated else (width,)
        return StoredFeedForward(
            gate=self._linear(gate, widths, spec.hidden_size, spec.mlp_bias),
            down=self._linear((down,), (spec.hidden_size,), width, spec.mlp_bias),
        )

    def _experts(self) -> StoredExperts:
        spec, names = self._spec, self._spec.family.names.experts
        assert spec.experts is not None
        assert names is not None
        router = self._linear(
            (names.router,), (spec.experts.count,), spec.hidden_size, spec.mlp_bias
        )
        if names.are_stacked:
            return StoredExperts(self._prefix, router, self._stacked_experts(names))
        experts = []
        for number in range(spec.experts.count):
            gate = tuple(name.format(number) for name in names.gate)
            experts.append(self._feed_forward(gate, names.down.format(number), spec.experts.width))
        return StoredExperts(self._prefix, router, tuple(experts))

    def _stacked_experts(self, names: ExpertTensorNames) -> StackedExperts:
        experts, hidden = self._spec.experts, self._spec.hidden_size
        assert experts is not None
        gate, down = f"{self._prefix}{names.gate[0]}", f"{self._prefix}{names.down}"
        both = 2 * experts.width

        def stack(name: str, inputs: int, outputs: int) -> tuple[StoredTensor, ...]:
            if not experts.is_mxfp4:
                return (StoredTensor(name, (experts.count, inputs, outputs)),)
            if inputs % mxfp4.GROUP_SIZE:
                raise CheckpointError(
                    f"{name} cannot be MXFP4: its {inputs} inputs are not a multiple of "
                    f"{mxfp4.GROUP_SIZE}."
                )
            groups = (experts.count, outputs, inputs // mxfp4.GROUP_SIZE)
            return (
                StoredTensor(f"{name}_blocks", (*groups, mxfp4.GROUP_SIZE // 2), dtype="U8"),
                StoredTensor(f"{name}_scales", groups, dtype="U8"),
            )

        return StackedExperts(
            gate=stack(gate, hidden, both),
            gate_bias=StoredTensor(f"{gate}_bias", (experts.count, both)),
            down=stack(down, experts.width, hidden),
            down_bias=StoredTensor(f"{down}_bias", (experts.count, hidden)),
        )


def _norm(spec: ModelSpec, name: str) -> StoredNorm:
    shape = (spec.hidden_size,)
    bias = StoredTensor(f"{name}.bias", shape) if spec.family.layer_norm else None
    return StoredNorm(StoredTensor(f"{name}.weight", shape), bias)


def _tensors(part: object) -> Iterator[StoredTensor]:
    if isinstance(part, StoredTensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _tensors(getattr(part, field.name))
