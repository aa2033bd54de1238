"""Loading of a layer's hyper-connections. Every rank has all of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.model.architecture.layers import HyperSpec
from services.engine.model.hyper_connections import Connection, HyperConnections, StreamMixture
from services.engine.model.parts.stored_hyper import StoredConnection, StoredHyper
from services.engine.model.parts.tensor_reader import TensorReader

__all__ = ["read_hyper_connections"]


def read_hyper_connections(
    reader: TensorReader, stored: StoredHyper, spec: HyperSpec
) -> HyperConnections:
    """Read the streams of a layer."""
    head = None
    if stored.head is not None:
        (head,) = _mixtures(reader, stored.head, [(spec.streams,)])
    return HyperConnections(
        mixer=_connection(reader, stored.mixer, spec),
        feed_forward=_connection(reader, stored.feed_forward, spec),
        is_first=stored.is_first,
        head=head,
    )


def _connection(reader: TensorReader, stored: StoredConnection, spec: HyperSpec) -> Connection:
    count = spec.streams
    reading, writing = _mixtures(reader, stored, [(count,), (count, count * count)])
    return Connection(reading, writing, spec)


def _mixtures(
    reader: TensorReader, stored: StoredConnection, parts: Sequence[Sequence[int]]
) -> list[StreamMixture]:
    """Read products stored as one. parts: for each product, counts of factors with one scale."""
    weight, bias, scale = (
        reader.tensor(each).to(reader.device, torch.float32, copy=True)
        for each in (stored.product, stored.base, stored.scale)
    )
    reader.step_bytes += weight.nbytes
    counts = torch.tensor([count for part in parts for count in part], device=reader.device)
    scales = scale.repeat_interleave(counts)
    sizes = [sum(part) for part in parts]

    def split(tensor: Tensor) -> tuple[Tensor, ...]:
        return tensor.split_with_sizes(sizes)

    return [
        StreamMixture(*each, reader.spec.norm_epsilon)
        for each in zip(split(weight), split(bias), split(scales), strict=True)
    ]
