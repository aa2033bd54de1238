"""Weights of the gated delta net: their names and shapes, and their loading."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.architecture.delta_shape import DeltaShape
from services.engine.model.checkpoint.quantized import decoded
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.delta_net import DeltaNetWeights
from services.engine.model.mixers.delta_rule import DeltaWeights
from services.engine.model.operators.composed_projections import ChainedProjection
from services.engine.model.operators.interface import Projection
from services.engine.model.parts.shard import Shard
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader, arranged, take_rows

__all__ = ["StoredDeltaNet", "read_delta_net", "stored_delta_net"]


@dataclass(frozen=True, slots=True)
class StoredDeltaNet:
    inputs: StoredLinear
    rates: StoredLinear
    """Product that computes beta and the decay; the same as `inputs` if that holds them"""
    gate: tuple[StoredLinear, StoredLinear] | None
    """Products that make the output gate in a row: the second reads the outputs of the first"""
    decay: tuple[StoredLinear, StoredLinear] | None
    convolution: tuple[StoredTensor, ...]
    """Weight of the convolution: one tensor, or one each for queries, keys and values"""
    a_log: StoredTensor
    dt_bias: StoredTensor
    norm: StoredTensor
    output: StoredLinear


def stored_delta_net(names: LayerNames, shape: DeltaShape) -> StoredDeltaNet:
    """Name the tensors of a layer's gated delta net."""
    own, hidden, outputs = names.names.delta_net, names.spec.hidden_size, shape.outputs
    assert own is not None
    keys = shape.key_heads * shape.key_dim
    parts = (keys, keys, outputs)
    inputs = {3: parts, 4: (*parts, outputs)}.get(len(own.inputs), (shape.channels, outputs))
    rates = (shape.value_heads,) if shape.rank else (shape.value_heads, shape.decays)
    if not own.rates:
        inputs = (*inputs, *rates)
    # Kimi stores a number for each head with as many dimensions as the decays of a batch
    a_log = (shape.value_heads,) if own.decay is None else (1, 1, shape.value_heads, 1)

    def pair(pair: tuple[str, str] | None, width: int) -> tuple[StoredLinear, StoredLinear] | None:
        if pair is None:
            return None
        first, second = pair
        return (
            names.linear((first,), (shape.rank,), hidden, False),
            names.linear((second,), (width,), shape.rank, False),
        )

    channels = (shape.channels,) if len(own.convolution) == 1 else parts
    stored_inputs = names.linear(own.inputs, inputs, hidden, False)
    return StoredDeltaNet(
        inputs=stored_inputs,
        rates=names.linear(own.rates, rates, hidden, False) if own.rates else stored_inputs,
        gate=pair(own.gate, outputs),
        decay=pair(own.decay, shape.decays),
        convolution=tuple(
            names.tensor(name, count, 1, shape.conv_width)
            for name, count in zip(own.convolution, channels, strict=True)
        ),
        a_log=names.tensor(own.a_log, *a_log),
        dt_bias=names.tensor(own.dt_bias, shape.decays),
        norm=names.tensor(own.norm, shape.value_dim),
        output=names.linear((own.output,), (hidden,), outputs, False),
    )


def read_delta_net(
    reader: TensorReader,
    stored: StoredDeltaNet,
    shape: DeltaShape,
    norm: StoredNorm | None,
) -> DeltaNetWeights:
    """Read a layer's gated delta net.

    shape: that of the whole model; norm: the norm whose output it reads.
    """
    own = reader.spec.family.names.delta_net
    assert own is not None
    groups = _Groups(shape, reader.shard, tiles_values=own.tiles_values)
    is_whole = stored.rates == stored.inputs
    inputs = groups.inputs(is_grouped=len(stored.inputs.weights) == 1 and not is_whole)
    rates = groups.rates(is_grouped=len(stored.rates.weights) == 1 and not is_whole)
    if is_whole:
        rates = [place + shape.channels + shape.outputs for place in rates]
    channels = torch.cat(groups.inputs(is_grouped=False)[:3])
    a_log = reader.tensor(stored.a_log).flatten()
    if own.has_rates:
        a_log = (-a_log).log()
    rule = DeltaWeights.prepare(
        torch.cat([reader.tensor(each) for each in stored.convolution])[channels].to(reader.device),
        None,
        a_log[groups.mine(shape.value_heads)].to(reader.device),
        reader.tensor(stored.dt_bias)[groups.mine(shape.decays)].to(reader.device),
        reader.tensor(stored.norm).to(reader.device),
    )
    mixed = reader.product(
        arranged(reader.linear(stored.inputs, norm), inputs), reader.operators_of(stored.inputs)
    )
    return DeltaNetWeights(
        inputs=reader.adapted(mixed, reader.site(stored.inputs, norm, torch.cat(inputs))),
        rates=_rates(reader, stored.rates, norm, rates),
        gate=_pair(reader, stored.gate, norm, groups.mine(shape.outputs), shape.rank),
        decay=_pair(reader, stored.decay, norm, groups.mine(shape.decays), shape.rank),
        rule=rule,
        output=reader.residual_projection(stored.output, groups.columns()),
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


def _pair(
    reader: TensorReader,
    stored: tuple[StoredLinear, StoredLinear] | None,
    norm: StoredNorm | None,
    places: Tensor,
    rank: int,
) -> Projection | None:
    """Read two products, the second of the first's outputs. places: this rank's outputs."""
    if stored is None:
        return None
    first = _exact(reader, stored[0], norm, None)
    second = _exact(reader, stored[1], None, places)
    return ChainedProjection(first, second, rank, reader.operators)


def _exact(
    reader: TensorReader,
    stored: StoredLinear,
    norm: StoredNorm | None,
    order: Tensor | None,
) -> Projection:
    """Read a product that is never rounded: decays add up over the tokens."""
    (part,) = reader.linear(stored, norm)
    weight, bias = part if order is None else take_rows(part, order)
    product = reader.operators.exact_projection(decoded(weight), bias)
    reader.step_bytes += product.weight_bytes
    return reader.adapted(product, reader.site(stored, norm, order))


class _Groups:
    """Places of this rank's heads among stored outputs.

    A group is a key head with its value heads. Outputs are stored part by part, or group by group
    with all parts of a group together. If `tiles_values`, parts that value heads share have the
    first value head of each group, then the second one of each, …
    """

    def __init__(self, shape: DeltaShape, shard: Shard, *, tiles_values: bool) -> None:
        self._shape = shape
        self._shard = shard
        self._tiles = tiles_values and shape.value_heads > shape.key_heads

    def inputs(self, *, is_grouped: bool) -> list[Tensor]:
        """Return the places of queries, keys, values and, unless it is apart, the output gate."""
        shape = self._shape
        keys, gate = shape.key_heads * shape.key_dim, () if shape.rank else (shape.outputs,)
        return self._places((keys, keys, shape.outputs, *gate), is_grouped)

    def rates(self, *, is_grouped: bool) -> list[Tensor]:
        """Return the places of beta and, unless it is apart, the decay."""
        decay = () if self._shape.rank else (self._shape.decays,)
        return self._places((self._shape.value_heads, *decay), is_grouped)

    def mine(self, width: int) -> Tensor:
        """Return the places of this rank's heads in one part."""
        return self._places((width,), False)[0]

    def columns(self) -> Tensor | None:
        """Return the places of all ranks' outputs; None = in order."""
        if not self._tiles:
            return None
        return self._by_group(torch.arange(self._shape.outputs)).flatten()

    def _by_group(self, part: Tensor) -> Tensor:
        """Return the places of tiled value heads, ordered by group: [groups, places]."""
        groups = self._shape.key_heads
        heads = part.view(self._shape.value_heads // groups, groups, -1)
        return heads.transpose(0, 1).reshape(groups, -1)

    def _places(self, widths: tuple[int, ...], is_grouped: bool) -> list[Tensor]:
        groups = self._shape.key_heads
        places = torch.arange(sum(widths))
        if is_grouped:
            parts = places.view(groups, -1).split_with_sizes([w // groups for w in widths], dim=1)
        else:
            # the last parts, all but queries and keys, are those of value heads
            first = 2 if len(widths) > 2 else 0
            parts = tuple(
                self._by_group(part) if self._tiles and number >= first else part.view(groups, -1)
                for number, part in enumerate(places.split_with_sizes(widths))
            )
        return [self._shard.rows(part).flatten() for part in parts]
