"""Stored tensors of feed-forward layers: dense, or a mixture of experts."""

from dataclasses import dataclass
from typing import TypeAlias

from services.engine.model.architecture.layers import DenseSpec, ExpertsSpec, FeedForwardSpec
from services.engine.model.checkpoint import mxfp4
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.families import ExpertTensorNames
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.stored import LayerNames, StoredLinear

__all__ = [
    "StackedExperts",
    "StoredDense",
    "StoredExperts",
    "StoredFeedForward",
    "StoredSharedExpert",
    "stored_feed_forward",
]


@dataclass(frozen=True, slots=True)
class StoredDense:
    """A dense layer, or one expert."""

    gate: StoredLinear
    """Both products of a gated layer, or the only one"""
    down: StoredLinear


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """All experts of a layer: floating-point weights, or MXFP4 blocks and their scales.

    MXFP4 weights are [experts, outputs, inputs], floating-point weights too, unless they alternate.
    """

    gate: tuple[StoredTensor, ...]
    gate_bias: StoredTensor | None
    down: tuple[StoredTensor, ...]
    down_bias: StoredTensor | None
    alternates: bool
    """Outputs of the gate's two products alternate; floating-point weights are [experts, inputs,
    outputs]"""


@dataclass(frozen=True, slots=True)
class StoredExperts:
    prefix: str
    """Beginning of the names in this layer"""
    router: StoredLinear
    experts: tuple[StoredDense, ...] | StackedExperts
    shared: "StoredSharedExpert | None"


@dataclass(frozen=True, slots=True)
class StoredSharedExpert:
    expert: StoredDense
    router: StoredLinear


StoredFeedForward: TypeAlias = StoredDense | StoredExperts


def stored_feed_forward(names: LayerNames, content: FeedForwardSpec) -> StoredFeedForward:
    """Name the tensors of a layer's feed-forward layer."""
    if isinstance(content, ExpertsSpec):
        return _experts(names, content)
    own = names.names
    return _dense(names, own.gate, own.down, content)


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
    router = names.linear((own.router,), (experts.count,), names.spec.hidden_size, experts.has_bias)
    shared = _shared_expert(names, own, experts) if experts.shared_width else None
    if own.are_stacked:
        return StoredExperts(names.prefix, router, _stacked_experts(names, own, experts), shared)
    stored = []
    for number in range(experts.count):
        gate = tuple(name.format(number) for name in own.gate)
        stored.append(_dense(names, gate, own.down.format(number), experts))
    return StoredExperts(names.prefix, router, tuple(stored), shared)


def _shared_expert(
    names: LayerNames, own: ExpertTensorNames, experts: ExpertsSpec
) -> StoredSharedExpert:
    alone = DenseSpec(experts.shared_width, experts.activation, experts.has_bias)
    return StoredSharedExpert(
        expert=_dense(names, own.shared_gate, own.shared_down, alone),
        router=names.linear((own.shared_router,), (1,), names.spec.hidden_size, False),
    )


def _stacked_experts(
    names: LayerNames, own: ExpertTensorNames, experts: ExpertsSpec
) -> StackedExperts:
    hidden, both = names.spec.hidden_size, 2 * experts.width

    def stack(name: str, inputs: int, outputs: int) -> tuple[StoredTensor, ...]:
        if not experts.is_mxfp4:
            shape = (inputs, outputs) if own.alternates else (outputs, inputs)
            return (names.tensor(name, experts.count, *shape),)
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

    def bias(name: str, outputs: int) -> StoredTensor | None:
        return names.tensor(f"{name}_bias", experts.count, outputs) if experts.has_bias else None

    gate, down = own.gate[0], own.down
    return StackedExperts(
        gate=stack(gate, hidden, both),
        gate_bias=bias(gate, both),
        down=stack(down, experts.width, hidden),
        down_bias=bias(down, hidden),
        alternates=own.alternates,
    )
