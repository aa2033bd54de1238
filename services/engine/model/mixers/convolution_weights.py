"""Weights of the gated short convolution: their names and shapes, and their loading."""

from dataclasses import dataclass

import torch

from services.engine.model.architecture.convolution_shape import ConvolutionShape
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.convolution import ConvolutionWeights
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader, arranged

__all__ = ["StoredConvolution", "read_convolution", "stored_convolution"]


@dataclass(frozen=True, slots=True)
class StoredConvolution:
    inputs: StoredLinear
    """Product that computes the input gate, the output gate, and the convolution's input"""
    convolution: StoredTensor
    bias: StoredTensor | None
    output: StoredLinear


def stored_convolution(names: LayerNames, shape: ConvolutionShape) -> StoredConvolution:
    """Name the tensors of a layer's short convolution."""
    own, hidden, channels = names.names.convolution, names.spec.hidden_size, shape.channels
    assert own is not None
    return StoredConvolution(
        inputs=names.linear((own.inputs,), (channels,) * 3, hidden, shape.has_bias),
        convolution=names.tensor(f"{own.convolution}.weight", channels, 1, shape.conv_width),
        bias=names.tensor(f"{own.convolution}.bias", channels) if shape.has_bias else None,
        output=names.linear((own.output,), (hidden,), channels, shape.has_bias),
    )


def read_convolution(
    reader: TensorReader,
    stored: StoredConvolution,
    shape: ConvolutionShape,
    norm: StoredNorm | None,
) -> ConvolutionWeights:
    """Read a layer's short convolution.

    shape: that of the whole model; norm: the norm whose output it reads.
    """
    mine = reader.shard.rows(torch.arange(shape.channels))
    places = [mine + part * shape.channels for part in range(3)]
    product = reader.product(
        arranged(reader.linear(stored.inputs, norm), places), reader.operators_of(stored.inputs)
    )
    factors = reader.tensor(stored.convolution)[mine].flatten(1).T
    bias = None if stored.bias is None else reader.tensor(stored.bias)[mine]
    return ConvolutionWeights(
        inputs=reader.adapted(product, reader.site(stored.inputs, norm, torch.cat(places))),
        convolution=factors.to(reader.device, torch.float32).contiguous(),
        bias=None if bias is None else bias.to(reader.device, torch.float32, copy=True),
        output=reader.residual_projection(stored.output),
    )
