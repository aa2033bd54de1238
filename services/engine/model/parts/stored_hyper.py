"""Stored tensors of a layer's hyper-connections."""

from dataclasses import dataclass

from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.parts.stored import LayerNames

__all__ = ["StoredConnection", "StoredHyper", "stored_hyper"]


@dataclass(frozen=True, slots=True)
class StoredConnection:
    product: StoredTensor
    """[factors, streams * hidden_size]"""
    base: StoredTensor
    """[factors]"""
    scale: StoredTensor
    """[1] or [3], a factor for each kind of outputs"""


@dataclass(frozen=True, slots=True)
class StoredHyper:
    mixer: StoredConnection
    feed_forward: StoredConnection
    head: StoredConnection | None
    """Weights that merge the streams; None: the layer is not the last one"""
    is_first: bool
    """True if the layer is the first one, so that the streams begin before it"""


def stored_hyper(names: LayerNames, model: LayerNames, layer: int) -> StoredHyper:
    """Name the tensors of a layer's hyper-connections. model: builder of the model's own names."""
    own, spec = names.names.hyper, names.spec
    count = spec.num_streams
    assert own is not None

    def connection(maker: LayerNames, name: str, factors: int, scales: int) -> StoredConnection:
        return StoredConnection(
            maker.tensor(f"{name}_fn", factors, count * spec.hidden_size),
            maker.tensor(f"{name}_base", factors),
            maker.tensor(f"{name}_scale", scales),
        )

    factors, is_last = (2 + count) * count, layer == spec.num_layers - 1
    return StoredHyper(
        mixer=connection(names, own.mixer, factors, 3),
        feed_forward=connection(names, own.feed_forward, factors, 3),
        head=connection(model, own.head, count, 1) if is_last else None,
        is_first=layer == 0,
    )
