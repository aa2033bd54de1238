"""Which tensors a checkpoint must hold, by name and shape, and what each is for."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.errors import CheckpointError
from services.engine.model.checkpoint.families import ExpertNames, QkNorm
from services.engine.model.checkpoint.tensors import Stored

__all__ = ["Experts", "FeedForward", "Layer", "Layout", "Linear", "Norm", "StackedExperts"]

_MXFP4_GROUP = 32
"""Weights that share a scale"""


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: its weights, one below the other, and a bias for each, or none."""

    weights: tuple[Stored, ...]
    biases: tuple[Stored, ...]


@dataclass(frozen=True, slots=True)
class Norm:
    weight: Stored
    bias: Stored | None


@dataclass(frozen=True, slots=True)
class FeedForward:
    gate: Linear
    """The weights of both products, or the only one's"""
    down: Linear


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """All experts of a layer: floating weights, or MXFP4 blocks and their scales.

    Floating ones are [experts, inputs, outputs], packed ones [experts, outputs, inputs]. Outputs of
    the two products that the gate combines take turns.
    """

    gate: tuple[Stored, ...]
    gate_bias: Stored
    down: tuple[Stored, ...]
    down_bias: Stored


@dataclass(frozen=True, slots=True)
class Experts:
    router: Linear
    experts: tuple[FeedForward, ...] | StackedExperts


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm | None
    qkv: Linear
    query_norm: Stored | None
    key_norm: Stored | None
    sinks: Stored | None
    output: Linear
    attention_post_norm: Norm | None
    feed_forward_norm: Norm | None
    feed_forward: FeedForward | Experts
    feed_forward_post_norm: Norm | None


@dataclass(frozen=True, slots=True)
class Layout:
    """Every tensor of a checkpoint."""

    embedding: Stored
    positions: Stored | None
    layers: tuple[Layer, ...]
    final_norm: Norm
    head: Stored | None
    """None: the embedding"""

    @staticmethod
    def of(spec: ModelSpec, root: str) -> "Layout":
        """`root` is what the names of all but the output projection begin with."""
        names = spec.family.names
        positions = None
        if names.positions is not None:
            shape = (spec.context_length, spec.hidden_size)
            positions = Stored(f"{root}{names.positions}.weight", shape)
        table = (spec.vocab_size, spec.hidden_size)
        return Layout(
            embedding=Stored(f"{root}{names.embedding}.weight", table),
            positions=positions,
            layers=tuple(
                _LayerNamer(spec, f"{root}{names.layers}.{index}.").layer(index)
                for index in range(spec.num_layers)
            ),
            final_norm=_norm(spec, f"{root}{names.final_norm}"),
            head=None if spec.tied_embeddings else Stored("lm_head.weight", table),
        )

    def tensors(self) -> Iterator[Stored]:
        return _tensors(self)


class _LayerNamer:
    """Names and shapes of one layer's tensors."""

    def __init__(self, spec: ModelSpec, prefix: str) -> None:
        self._spec = spec
        self._prefix = prefix

    def layer(self, index: int) -> Layer:
        spec, names = self._spec, self._spec.family.names
        hidden = spec.hidden_size
        attended, cached = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        has_experts = spec.experts is not None and spec.experts.layers[index]
        return Layer(
            attention_norm=self._norm(names.attention_norm),
            qkv=self._linear(names.qkv, (attended, cached, cached), hidden, spec.qkv_bias),
            query_norm=self._qk_norm(names.query_norm, attended),
            key_norm=self._qk_norm(names.key_norm, cached),
            sinks=None
            if names.sinks is None
            else Stored(f"{self._prefix}{names.sinks}", (spec.num_heads,)),
            output=self._linear((names.output,), (hidden,), attended, spec.output_bias),
            attention_post_norm=self._norm(names.attention_post_norm),
            feed_forward_norm=self._norm(names.feed_forward_norm),
            feed_forward=self._experts()
            if has_experts
            else self._feed_forward(names.gate, names.down, spec.intermediate_size),
            feed_forward_post_norm=self._norm(names.feed_forward_post_norm),
        )

    def _norm(self, name: str | None) -> Norm | None:
        return None if name is None else _norm(self._spec, f"{self._prefix}{name}")

    def _qk_norm(self, name: str, width: int) -> Stored | None:
        kind = self._spec.family.qk_norm
        if kind is QkNorm.NONE:
            return None
        shape = self._spec.head_dim if kind is QkNorm.HEAD else width
        return Stored(f"{self._prefix}{name}.weight", (shape,))

    def _linear(
        self, names: tuple[str, ...], outputs: tuple[int, ...], inputs: int, bias: bool
    ) -> Linear:
        """One tensor for each of `outputs`, or a single one for all."""
        if len(names) == 1:
            outputs = (sum(outputs),)
        weights, biases = [], []
        for name, count in zip(names, outputs, strict=True):
            shape = (inputs, count) if self._spec.family.transposed else (count, inputs)
            weights.append(Stored(f"{self._prefix}{name}.weight", shape))
            biases.append(Stored(f"{self._prefix}{name}.bias", (count,)))
        return Linear(tuple(weights), tuple(biases) if bias else ())

    def _feed_forward(self, gate: tuple[str, ...], down: str, width: int) -> FeedForward:
        spec = self._spec
        widths = (width, width) if spec.activation.gated else (width,)
        return FeedForward(
            gate=self._linear(gate, widths, spec.hidden_size, spec.mlp_bias),
            down=self._linear((down,), (spec.hidden_size,), width, spec.mlp_bias),
        )

    def _experts(self) -> Experts:
        spec, names = self._spec, self._spec.family.names.experts
        assert spec.experts is not None
        assert names is not None
        router = self._linear(
            (names.router,), (spec.experts.count,), spec.hidden_size, spec.mlp_bias
        )
        if names.are_stacked:
            return Experts(router, self._stacked_experts(names))
        experts = []
        for number in range(spec.experts.count):
            gate = tuple(name.format(number) for name in names.gate)
            experts.append(self._feed_forward(gate, names.down.format(number), spec.experts.width))
        return Experts(router, tuple(experts))

    def _stacked_experts(self, names: ExpertNames) -> StackedExperts:
        experts, hidden = self._spec.experts, self._spec.hidden_size
        assert experts is not None
        gate, down = f"{self._prefix}{names.gate[0]}", f"{self._prefix}{names.down}"
        both = 2 * experts.width

        def stack(name: str, inputs: int, outputs: int) -> tuple[Stored, ...]:
            if not experts.packed:
                return (Stored(name, (experts.count, inputs, outputs)),)
            if inputs % _MXFP4_GROUP:
                raise CheckpointError(
                    f"{name} cannot be MXFP4, since its {inputs} inputs are not a multiple of "
                    f"{_MXFP4_GROUP}."
                )
            groups = (experts.count, outputs, inputs // _MXFP4_GROUP)
            return (
                Stored(f"{name}_blocks", (*groups, _MXFP4_GROUP // 2), packed=True),
                Stored(f"{name}_scales", groups, packed=True),
            )

        return StackedExperts(
            gate=stack(gate, hidden, both),
            gate_bias=Stored(f"{gate}_bias", (experts.count, both)),
            down=stack(down, experts.width, hidden),
            down_bias=Stored(f"{down}_bias", (experts.count, hidden)),
        )


def _norm(spec: ModelSpec, name: str) -> Norm:
    shape = (spec.hidden_size,)
    bias = Stored(f"{name}.bias", shape) if spec.family.layer_norm else None
    return Norm(Stored(f"{name}.weight", shape), bias)


def _tensors(part: object) -> Iterator[Stored]:
    if isinstance(part, Stored):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _tensors(getattr(part, field.name))
