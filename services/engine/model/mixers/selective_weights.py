"""Weights of Mamba: their names and shapes, and their loading."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.checkpoint.quantized import decoded
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.selective import SelectiveWeights
from services.engine.model.mixers.selective_scan import SelectiveConstants
from services.engine.model.operators.interface import Projection
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader, arranged

__all__ = ["StoredSelective", "read_selective", "stored_selective"]


@dataclass(frozen=True, slots=True)
class StoredSelective:
    inputs: StoredLinear
    """Product that computes the convolution's input, and the gate"""
    convolution: StoredTensor
    convolution_bias: StoredTensor | None
    factors: StoredLinear
    steps: StoredLinear
    norms: tuple[StoredTensor, ...]
    """Empty: there are none, or they have no weights"""
    a_log: StoredTensor
    skip: StoredTensor
    output: StoredLinear


def stored_selective(names: LayerNames, shape: SelectiveShape) -> StoredSelective:
    """Name the tensors of a Mamba layer."""
    own, hidden, channels = names.names.selective, names.spec.hidden_size, shape.channels
    assert own is not None
    return StoredSelective(
        inputs=names.linear((own.inputs,), (channels, channels), hidden, shape.has_bias),
        convolution=names.tensor(f"{own.convolution}.weight", channels, 1, shape.conv_width),
        convolution_bias=names.tensor(f"{own.convolution}.bias", channels)
        if shape.has_conv_bias
        else None,
        factors=names.linear((own.factors,), shape.factors, channels, False),
        steps=names.linear((own.steps,), (channels,), shape.step_rank, True),
        norms=tuple(
            names.tensor(f"{name}.weight", width)
            for name, width in zip(own.norms or (), shape.factors, strict=False)
        ),
        a_log=names.tensor(own.a_log, channels, shape.state_width),
        skip=names.tensor(own.skip, channels),
        output=names.linear((own.output,), (hidden,), channels, shape.has_bias),
    )


def read_selective(
    reader: TensorReader,
    stored: StoredSelective,
    shape: SelectiveShape,
    norm: StoredNorm | None,
) -> SelectiveWeights:
    """Read a Mamba layer.

    shape: that of the whole model; norm: what it reads.
    """
    own = reader.spec.family.names.selective
    assert own is not None
    mine = reader.shard.rows(torch.arange(shape.channels))
    places = [mine, mine + shape.channels]
    inputs = reader.product(
        arranged(reader.linear(stored.inputs, norm), places), reader.operators_of(stored.inputs)
    )
    steps, step_bias = _steps(reader, stored.steps)
    a_log, bias = reader.tensor(stored.a_log)[mine], stored.convolution_bias

    def constant(tensor: Tensor) -> Tensor:
        return tensor.to(reader.device, torch.float32, copy=True).contiguous()

    return SelectiveWeights(
        inputs=reader.adapted(inputs, reader.site(stored.inputs, norm, torch.cat(places))),
        factors=_factors(reader, stored.factors),
        steps=steps,
        norms=tuple(constant(reader.tensor(each)) for each in stored.norms)
        or tuple(torch.ones(width, device=reader.device) for width in shape.factors)
        if shape.has_norms
        else (),
        constants=SelectiveConstants(
            convolution=constant(reader.tensor(stored.convolution).flatten(1)[mine].T),
            convolution_bias=None if bias is None else constant(reader.tensor(bias)[mine]),
            rates=constant((-a_log if own.has_rates else a_log.float().exp()).T),
            step_bias=constant(step_bias),
            skip=constant(reader.tensor(stored.skip).flatten()[mine]),
        ),
        output=reader.residual_projection(stored.output),
    )


def _factors(reader: TensorReader, stored: StoredLinear) -> Projection:
    """Read the product that computes time steps and factors, which all ranks sum up.

    It is never rounded: time steps are exponents.
    """
    ((weight, _),) = reader.linear(stored, None)
    part = decoded(reader.shard.columns(weight))
    product = reader.operators.exact_projection(part, None)
    reader.step_bytes += product.weight_bytes
    site = reader.site(stored)
    site = replace(site, columns=reader.columns_of(site.inputs))
    return reader.shard.summed(reader.adapted(product, site), reader.operators)


def _steps(reader: TensorReader, stored: StoredLinear) -> tuple[Projection, Tensor]:
    """Read the product that widens time steps, and its bias, which is added in float32.

    No adapter changes it, since in transformers none does.
    """
    ((weight, bias),) = reader.linear(stored, None)
    assert bias is not None
    product = reader.operators.exact_projection(decoded(reader.shard.outputs(weight)), None)
    reader.step_bytes += product.weight_bytes
    return product, reader.shard.rows(bias)
