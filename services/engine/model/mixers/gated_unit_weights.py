"""Weights of a real-gated linear recurrent unit: their names and shapes, and their loading."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

from services.engine.model.architecture.gated_unit_shape import GatedUnitShape
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.gated_unit import GatedUnitWeights
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader, arranged

__all__ = ["StoredGatedUnit", "read_gated_unit", "stored_gated_unit"]

_DECAY = -8.0
"""Factor of the stored decay's softplus"""


@dataclass(frozen=True, slots=True)
class StoredGatedUnit:
    inputs: StoredLinear
    """Products that compute the values to convolve, and the output gate"""
    convolution: StoredTensor
    bias: StoredTensor
    gates: tuple[StoredTensor, ...]
    """Products of the input gate and of the decay, [heads, inputs, outputs]"""
    gate_biases: tuple[StoredTensor, ...]
    """[heads, outputs], biases of `gates`"""
    decay: StoredTensor
    output: StoredLinear


def stored_gated_unit(names: LayerNames, shape: GatedUnitShape) -> StoredGatedUnit:
    """Name the tensors of a layer's gated unit."""
    own, hidden, channels = names.names.gated_unit, names.spec.hidden_size, shape.channels
    assert own is not None
    heads, width = shape.heads, shape.head_width
    return StoredGatedUnit(
        inputs=names.linear(own.inputs, (channels,) * 2, hidden, True),
        convolution=names.tensor(f"{own.convolution}.weight", channels, 1, shape.conv_width),
        bias=names.tensor(f"{own.convolution}.bias", channels),
        gates=tuple(names.tensor(f"{gate}_weight", heads, width, width) for gate in own.gates),
        gate_biases=tuple(names.tensor(f"{gate}_bias", heads, width) for gate in own.gates),
        decay=names.tensor(own.decay, channels),
        output=names.linear((own.output,), (hidden,), channels, True),
    )


def read_gated_unit(
    reader: TensorReader, stored: StoredGatedUnit, shape: GatedUnitShape, norm: StoredNorm | None
) -> GatedUnitWeights:
    """Read a layer's gated unit. Each rank has its heads.

    shape: that of the whole model; norm: the norm whose output it reads.
    """
    mine = reader.shard.rows(torch.arange(shape.channels))
    product = reader.product(
        arranged(reader.linear(stored.inputs, norm), [mine, mine + shape.channels]),
        reader.operators_of(stored.inputs),
    )
    order = torch.cat((mine, mine + shape.channels))

    def kept(tensor: Tensor) -> Tensor:
        reader.step_bytes += tensor.nbytes
        return tensor.to(reader.device, torch.float32, copy=True).contiguous()

    gates, biases = (
        torch.cat([reader.shard.rows(reader.tensor(part)) for part in parts], dim=-1)
        for parts in (stored.gates, stored.gate_biases)
    )
    decay = reader.tensor(stored.decay)[mine].float()
    return GatedUnitWeights(
        inputs=reader.adapted(product, reader.site(stored.inputs, norm, order)),
        convolution=kept(reader.tensor(stored.convolution)[mine].flatten(1).T),
        bias=kept(reader.tensor(stored.bias)[mine]),
        gates=kept(gates),
        gate_bias=kept(biases)[:, None],
        decay=kept(_DECAY * softplus(decay)),
        output=reader.residual_projection(stored.output),
    )
