"""Stored tensors of feed-forward layers: dense, or a mixture of experts."""

from dataclasses import dataclass, replace
from typing import TypeAlias

from services.engine.model.architecture.activation import Nonlinearity
from services.engine.model.architecture.layers import (
    BesideSpec,
    DenseSpec,
    ExpertsSpec,
    FeedForwardSpec,
    NoFeedForward,
)
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint import mxfp4
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.expert_names import ExpertStack, ExpertTensorNames
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm

__all__ = [
    "StackedExperts",
    "StoredBeside",
    "StoredDense",
    "StoredExperts",
    "StoredFeedForward",
    "StoredSharedExpert",
    "StoredShortcut",
    "stored_feed_forward",
    "unread_experts",
]


@dataclass(frozen=True, slots=True)
class StoredDense:
    """Tensors of a dense layer, or of one expert."""

    gate: StoredLinear
    """Gate and up of a gated layer, or the only product"""
    down: StoredLinear
    activation: tuple[StoredTensor, ...] = ()
    """Constants of the activation: alpha_p, alpha_n, beta and eps of xIELU"""


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Tensors of all experts of a layer: floats, or MXFP4 blocks and their scales.

    MXFP4 weights are [experts, outputs, inputs], whatever the layout.
    """

    layout: ExpertStack
    count: int
    gate: tuple[StoredTensor, ...]
    """Gate and up of all experts, in one tensor unless the layout is flat"""
    gate_bias: StoredTensor | None
    down: tuple[StoredTensor, ...]
    down_bias: StoredTensor | None


@dataclass(frozen=True, slots=True)
class StoredExperts:
    prefix: str
    """Beginning of the names in this layer"""
    router: StoredLinear
    choice_bias: StoredTensor | None
    by_token: StoredTensor | None
    """Integers [vocab_size, per_token], the experts of each token id; None: scores choose"""
    experts: tuple[StoredDense, ...] | StackedExperts
    shared: "StoredSharedExpert | None"
    weighed_shared: tuple[StoredTensor, ...] = ()
    """Stacks of the shared experts that the router weighs: gate and up, or both in one; down"""


@dataclass(frozen=True, slots=True)
class StoredSharedExpert:
    expert: StoredDense
    router: StoredLinear | None


@dataclass(frozen=True, slots=True)
class StoredBeside:
    """Tensors of a dense layer and experts, each with norms of its own."""

    dense: StoredDense
    dense_post_norm: StoredNorm
    experts: StoredExperts
    norm: StoredNorm
    post_norm: StoredNorm
    router_scale: StoredTensor
    expert_scale: StoredTensor


@dataclass(frozen=True, slots=True)
class StoredShortcut:
    """Tensors of a dense layer, and of experts whose output joins the residual later."""

    dense: StoredDense
    experts: StoredExperts


StoredFeedForward: TypeAlias = StoredDense | StoredExperts | StoredBeside | StoredShortcut


def stored_feed_forward(names: LayerNames, content: FeedForwardSpec) -> StoredFeedForward | None:
    """Name the tensors of a layer's feed-forward layer; None: it has none."""
    if isinstance(content, NoFeedForward):
        return None
    if isinstance(content, ExpertsSpec):
        return _experts(names, content)
    own = names.names
    if isinstance(content, BesideSpec):
        if content.is_shortcut:
            dense = _dense(names, own.gate, own.down, content.dense)
            return StoredShortcut(dense, _experts(names, content.experts))
        return _beside(names, content)
    dense = _dense(names, own.gate, own.down, content)
    has_constants = content.activation.nonlinearity is Nonlinearity.XIELU
    if own.activation is None or not has_constants:
        return dense
    shapes: dict[str, tuple[int, ...]] = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    constants = (names.tensor(f"{own.activation}.{n}", *shape) for n, shape in shapes.items())
    return replace(dense, activation=tuple(constants))


def unread_experts(spec: ModelSpec) -> list[str]:
    """Return the modules below a layer that files may hold for experts without weights."""
    own = spec.family.names.experts
    layers = (layer.feed_forward for layer in spec.layers)
    experts = [each.experts for each in layers if isinstance(each, BesideSpec)]
    if own is None or not experts:
        return []
    numbers = range(experts[0].count, experts[0].num_choices)
    return [name.format(number) for number in numbers for name in own.gate]


def _beside(names: LayerNames, content: BesideSpec) -> StoredBeside:
    own, beside = names.names, names.names.beside
    return StoredBeside(
        dense=_dense(names, own.gate, own.down, content.dense),
        dense_post_norm=names.required_norm(beside.dense_post_norm),
        experts=_experts(names, content.experts),
        norm=names.required_norm(beside.norm),
        post_norm=names.required_norm(beside.post_norm),
        router_scale=names.tensor(beside.router_scale, names.spec.hidden_size),
        expert_scale=names.tensor(beside.expert_scale, content.experts.count),
    )


def _dense(
    names: LayerNames, gate: tuple[str, ...], down: str, content: DenseSpec | ExpertsSpec
) -> StoredDense:
    hidden, width = names.spec.hidden_size, content.width
    widths = (width, width) if content.activation.gated else (width,)
    return StoredDense(
        gate=names.linear(gate, widths, hidden, content.has_bias),
        down=names.linear((down,), (hidden,), width, content.has_bias),
    )


def _experts(names: LayerNames, experts: ExpertsSpec) -> StoredExperts:
    own = names.names.experts
    assert own is not None
    choices = experts.num_choices
    router = names.linear((own.router,), (choices,), names.spec.hidden_size, experts.has_bias)
    bias = None
    if experts.routing.has_bias:
        chosen = choices - experts.weighed_shared
        shape = (1, chosen) if own.choice_bias_is_row else (chosen,)
        bias = names.tensor(own.choice_bias, *shape)
    by_token, vocabulary = None, names.spec.vocab_size
    if experts.routing.is_by_token:
        table = names.tensor(own.by_token, vocabulary, experts.routing.per_token)
        by_token = replace(table, dtype=("I32", "I64"))
    shared = None if experts.shared is None else _shared_expert(names, own, experts.shared)
    if own.are_stacked:
        stacked = _stacked_experts(names, own, experts)
        also = _shared_stack(names, own, experts)
        return StoredExperts(names.prefix, router, bias, by_token, stacked, shared, also)
    stored = []
    for number in range(experts.count):
        gate = tuple(name.format(number) for name in own.gate)
        stored.append(_dense(names, gate, own.down.format(number), experts))
    return StoredExperts(names.prefix, router, bias, by_token, tuple(stored), shared)


def _shared_expert(
    names: LayerNames, own: ExpertTensorNames, shared: DenseSpec
) -> StoredSharedExpert:
    hidden, router = names.spec.hidden_size, own.shared_router
    return StoredSharedExpert(
        expert=_dense(names, own.shared_gate, own.shared_down, shared),
        router=names.linear((router,), (1,), hidden, False) if router else None,
    )


def _shared_stack(
    names: LayerNames, own: ExpertTensorNames, experts: ExpertsSpec
) -> tuple[StoredTensor, ...]:
    """Name the stacks of the shared experts that the router weighs."""
    if not experts.weighed_shared:
        return ()
    *gate, down = own.shared_stack
    count, hidden, width = experts.weighed_shared, names.spec.hidden_size, experts.width
    outputs = 2 * width // len(gate)
    gates = (names.tensor(name, count, outputs, hidden) for name in gate)
    return (*gates, names.tensor(down, count, hidden, width))


def _stacked_experts(
    names: LayerNames, own: ExpertTensorNames, experts: ExpertsSpec
) -> StackedExperts:
    hidden, both, layout = names.spec.hidden_size, 2 * experts.width, own.stack

    def stack(name: str, inputs: int, outputs: int) -> tuple[StoredTensor, ...]:
        if not experts.is_mxfp4:
            shape = (inputs, outputs) if layout.transposed else (outputs, inputs)
            count = experts.count - experts.weighed_shared
            tensor = names.tensor(f"{name}{layout.suffix}", count, *shape)
            return (replace(tensor, in_any_order=layout.in_any_order),)
        if inputs % mxfp4.GROUP_SIZE:
            raise CheckpointError(
                f"{names.prefix}{name} cannot be MXFP4: its {inputs} inputs are not a multiple of "
                f"{mxfp4.GROUP_SIZE}."
            )
        groups = (experts.count, outputs, inputs // mxfp4.GROUP_SIZE)
        prefix = f"{names.prefix}{name}"
        return (
            StoredTensor(f"{prefix}_blocks", (*groups, mxfp4.GROUP_SIZE // 2), dtype="U8"),
            StoredTensor(f"{prefix}_scales", groups, dtype="U8"),
        )

    if layout.is_flat:
        shape = (experts.count * experts.width, hidden)
        flat = [names.tensor(f"{name}{layout.suffix}", *shape) for name in (*own.gate, own.down)]
        return StackedExperts(layout, experts.count, tuple(flat[:-1]), None, (flat[-1],), None)

    def bias(name: str, outputs: int) -> StoredTensor | None:
        return names.tensor(f"{name}_bias", experts.count, outputs) if experts.has_bias else None

    gate, down = own.gate[0], own.down
    return StackedExperts(
        layout=layout,
        count=experts.count,
        gate=stack(gate, hidden, both),
        gate_bias=bias(gate, both),
        down=stack(down, experts.width, hidden),
        down_bias=bias(down, hidden),
    )
