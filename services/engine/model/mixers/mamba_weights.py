"""Weights of Mamba-2: their names and shapes, and their loading."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.checkpoint.quantized import decoded
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.gated_norm import GatedNorm, norm_ranks
from services.engine.model.mixers.mamba import MambaWeights
from services.engine.model.mixers.mamba_scan import MambaConstants
from services.engine.model.parts.shard import Shard
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader, arranged

__all__ = ["StoredMamba", "read_mamba", "stored_mamba"]


@dataclass(frozen=True, slots=True)
class StoredMamba:
    inputs: StoredLinear
    """Product that computes the gate, the convolution's input, and the time steps"""
    convolution: StoredTensor
    convolution_bias: StoredTensor | None
    a_log: StoredTensor
    step_bias: StoredTensor
    skip: StoredTensor
    norm: StoredTensor | None
    output: StoredLinear


def stored_mamba(names: LayerNames, shape: MambaShape) -> StoredMamba:
    """Name the tensors of a Mamba-2 layer."""
    own, hidden, channels = names.names.mamba, names.spec.hidden_size, shape.channels
    assert own is not None
    widths = (shape.outputs, channels, shape.heads)
    return StoredMamba(
        inputs=names.linear((own.inputs,), widths, hidden, shape.has_bias),
        convolution=names.tensor(f"{own.convolution}.weight", channels, 1, shape.conv_width),
        convolution_bias=names.tensor(f"{own.convolution}.bias", channels)
        if shape.has_conv_bias
        else None,
        a_log=names.tensor(own.a_log, shape.heads),
        step_bias=names.tensor(own.step_bias, shape.heads),
        skip=names.tensor(own.skip, shape.heads),
        norm=names.tensor(own.norm, *_norm_sizes(shape, own.norm_by_group))
        if shape.norm_width
        else None,
        output=names.linear((own.output,), (hidden,), shape.outputs, shape.has_output_bias),
    )


def _norm_sizes(shape: MambaShape, by_group: bool) -> tuple[int, ...]:
    return (shape.groups, shape.outputs // shape.groups) if by_group else (shape.outputs,)


def read_mamba(
    reader: TensorReader,
    stored: StoredMamba,
    shape: MambaShape,
    norm: StoredNorm | None,
) -> MambaWeights:
    """Read a Mamba-2 layer.

    shape: that of the whole model; norm: the norm whose output it reads.
    """
    own = reader.spec.family.names.mamba
    assert own is not None
    places = _Places(shape, reader.shard)
    parts = reader.linear(stored.inputs, norm)
    inputs = arranged(parts, [places.gate, *places.mixed])
    ((steps, step_bias),) = arranged(parts, [places.steps])
    operators = reader.operators_of(stored.inputs)
    product = reader.operators.exact_projection(decoded(steps), step_bias)
    reader.step_bytes += product.weight_bytes
    read = torch.cat([places.gate, *places.mixed])
    channels = torch.cat(places.mixed) - shape.outputs
    a_log = reader.tensor(stored.a_log).flatten()

    def constant(tensor: Tensor) -> Tensor:
        return tensor.to(reader.device, torch.float32, copy=True)

    bias, weight = stored.convolution_bias, stored.norm
    return MambaWeights(
        inputs=reader.adapted(
            reader.product(inputs, operators), reader.site(stored.inputs, norm, read)
        ),
        steps=reader.adapted(product, reader.site(stored.inputs, norm, places.steps)),
        constants=MambaConstants(
            convolution=constant(
                reader.tensor(stored.convolution).flatten(1)[channels].T.contiguous()
            ),
            convolution_bias=None if bias is None else constant(reader.tensor(bias)[channels]),
            rates=constant((-a_log if own.has_rates else a_log.float().exp())[places.heads]),
            step_bias=constant(reader.tensor(stored.step_bias).flatten()[places.heads]),
            skip=constant(reader.tensor(stored.skip).flatten()[places.heads]),
            norm=GatedNorm.of(
                shape,
                None if weight is None else constant(reader.tensor(weight).flatten()[places.gate]),
                norm_ranks(shape.outputs, shape.norm_width, reader.shard),
            ),
        ),
        output=reader.residual_projection(stored.output),
    )


class _Places:
    """Places of this rank's heads and groups among stored outputs."""

    def __init__(self, shape: MambaShape, shard: Shard) -> None:
        self.heads = shard.rows(torch.arange(shape.heads))
        self.gate = shard.rows(torch.arange(shape.outputs))
        groups = shard.of_heads(shape.groups).rows(
            torch.arange(shape.factors).view(shape.groups, -1)
        )
        opened = 2 * shape.outputs
        self.mixed = [
            self.gate + shape.outputs,
            groups.flatten() + opened,
            groups.flatten() + opened + shape.factors,
        ]
        """Places of heads, then of the factors of inputs and of outputs"""
        self.steps = self.heads + shape.outputs + shape.channels
