"""Stored tensors of a layer's streams (Gemma 3n's AltUp and LAuReL)."""

from dataclasses import dataclass

from services.engine.model.architecture.layers import AltUpSpec
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm

__all__ = ["StoredAltUp", "stored_altup"]


@dataclass(frozen=True, slots=True)
class StoredAltUp:
    router_norm: StoredNorm
    router: StoredLinear
    prediction: StoredLinear
    correction: StoredLinear
    scale: StoredTensor
    laurel_left: StoredLinear
    laurel_right: StoredLinear
    laurel_norm: StoredNorm
    expansions: tuple[StoredLinear, ...]
    """Products that make the streams; empty in all layers but the first"""
    mergers: tuple[StoredLinear, ...]
    """Products that join the streams; empty in all layers but the last"""


def stored_altup(names: LayerNames, model: LayerNames, spec: AltUpSpec, layer: int) -> StoredAltUp:
    """Name the tensors of a layer's streams. model: builder of the model's own names."""
    own, hidden, count = names.names.altup, names.spec.hidden_size, spec.streams
    assert own is not None

    def products(name: str, wanted: bool) -> tuple[StoredLinear, ...]:
        numbers = range(count - 1) if wanted else ()
        return tuple(
            model.linear((name.format(number),), (hidden,), hidden, False) for number in numbers
        )

    return StoredAltUp(
        router_norm=names.required_norm(own.router_norm),
        router=names.linear((own.router,), (count,), hidden, False),
        prediction=names.linear((own.prediction,), (count * count,), count, False),
        correction=names.linear((own.correction,), (count,), count, False),
        scale=names.tensor(own.scale, hidden),
        laurel_left=names.linear((own.laurel_left,), (spec.laurel_rank,), hidden, False),
        laurel_right=names.linear((own.laurel_right,), (hidden,), spec.laurel_rank, False),
        laurel_norm=names.required_norm(own.laurel_norm),
        expansions=products(own.expansion, layer == 0),
        mergers=products(own.merger, layer == names.spec.num_layers - 1),
    )
