"""Weights of the gated delta net: their names and shapes, and their loading."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.architecture.delta_shape import DeltaShape
from services.engine.model.checkpoint.quantized import decoded
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.delta_net import DeltaNetWeights
from services.engine.model.mixers.delta_rule import DeltaWeights
from services.engine.model.operators.interface import Projection
from services.engine.model.shard import Shard
from services.engine.model.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.tensor_reader import TensorReader, arranged

__all__ = ["StoredDeltaNet", "read_delta_net", "stored_delta_net"]


@dataclass(frozen=True, slots=True)
class StoredDeltaNet:
    inputs: StoredLinear
    rates: StoredLinear
    convolution: StoredTensor
    a_log: StoredTensor
    dt_bias: StoredTensor
    norm: StoredTensor
    output: StoredLinear


def stored_delta_net(names: LayerNames, shape: DeltaShape) -> StoredDeltaNet:
    """Name the tensors of a layer's gated delta net."""
    own, hidden, outputs = names.names.delta_net, names.spec.hidden_size, shape.outputs
    assert own is not None
    return StoredDeltaNet(
        inputs=names.linear(own.inputs, (shape.channels, outputs), hidden, False),
        rates=names.linear(own.rates, (shape.value_heads, shape.decays), hidden, False),
        convolution=names.tensor(own.convolution, shape.channels, 1, shape.conv_width),
        a_log=names.tensor(own.a_log, shape.value_heads),
        dt_bias=names.tensor(own.dt_bias, shape.decays),
        norm=names.tensor(own.norm, shape.value_dim),
        output=names.linear((own.output,), (hidden,), outputs, False),
    )


def read_delta_net(
    reader: TensorReader,
    stored: StoredDeltaNet,
    shape: DeltaShape,
    norm: StoredNorm | None,
    post_norm: StoredNorm | None,
) -> DeltaNetWeights:
    """Read a layer's gated delta net.

    shape: that of the whole model; norm: what it reads; post_norm: norm of what it adds to the
    residual.
    """
    groups = _Groups(shape, reader.shard)
    is_grouped = len(stored.inputs.weights) == 1
    inputs, rates = groups.inputs(is_grouped=is_grouped), groups.rates(is_grouped=is_grouped)
    channels = torch.cat(groups.inputs(is_grouped=False)[:3])
    rule = DeltaWeights.prepare(
        reader.tensor(stored.convolution)[channels].to(reader.device),
        None,
        reader.tensor(stored.a_log)[groups.mine(shape.value_heads)].to(reader.device),
        reader.tensor(stored.dt_bias)[groups.mine(shape.decays)].to(reader.device),
        reader.tensor(stored.norm).to(reader.device),
    )
    mixed = reader.product(
        arranged(reader.linear(stored.inputs, norm), inputs), reader.operators_of(stored.inputs)
    )
    return DeltaNetWeights(
        inputs=reader.adapted(mixed, reader.site(stored.inputs, norm, torch.cat(inputs))),
        rates=_rates(reader, stored.rates, norm, rates),
        rule=rule,
        output=reader.residual_projection(stored.output, post_norm),
    )


def _rates(
    reader: TensorReader, stored: StoredLinear, norm: StoredNorm | None, places: list[Tensor]
) -> Projection:
    parts = arranged(reader.linear(stored, norm), places)
    product = reader.operators.exact_projection(
        torch.cat([decoded(each) for each, _ in parts]), None
    )
    reader.step_bytes += product.weight_bytes
    return reader.adapted(product, reader.site(stored, norm, torch.cat(places)))


class _Groups:
    """Places of this rank's heads among stored outputs.

    A group is a key head with its value heads. Outputs are stored part by part, or group by group
    with all parts of a group together.
    """

    def __init__(self, shape: DeltaShape, shard: Shard) -> None:
        self._shape = shape
        self._shard = shard

    def inputs(self, *, is_grouped: bool) -> list[Tensor]:
        """Return the places of queries, keys, values and output gates."""
        shape = self._shape
        keys = shape.key_heads * shape.key_dim
        return self._places((keys, keys, shape.outputs, shape.outputs), is_grouped)

    def rates(self, *, is_grouped: bool) -> list[Tensor]:
        """Return the places of beta and decay."""
        return self._places((self._shape.value_heads, self._shape.decays), is_grouped)

    def mine(self, width: int) -> Tensor:
        """Return the places of this rank's part of one part."""
        return self._places((width,), False)[0]

    def _places(self, widths: tuple[int, ...], is_grouped: bool) -> list[Tensor]:
        groups = self._shape.key_heads
        places = torch.arange(sum(widths))
        if is_grouped:
            parts = places.view(groups, -1).split_with_sizes([w // groups for w in widths], dim=1)
        else:
            parts = tuple(part.view(groups, -1) for part in places.split_with_sizes(widths))
        return [self._shard.rows(part).flatten() for part in parts]
