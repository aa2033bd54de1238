"""Weights of lightning attention: their names and shapes, and their loading."""

from dataclasses import dataclass

import torch

from services.engine.model.architecture.delta_shape import OutputGate
from services.engine.model.architecture.lightning_shape import LightningShape
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.gated_norm import GatedNorm, norm_ranks
from services.engine.model.mixers.lightning import LightningWeights
from services.engine.model.operators.interface import Projection
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader, take_rows

__all__ = ["StoredLightning", "read_lightning", "stored_lightning"]

_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class StoredLightning:
    inputs: StoredLinear
    """Product that computes query, key and value of the first head, then of the next one, …"""
    gate: StoredLinear
    norm: StoredTensor
    output: StoredLinear


def stored_lightning(names: LayerNames, shape: LightningShape) -> StoredLightning:
    """Name the tensors of a layer's lightning attention."""
    own, hidden, width = names.names.lightning, names.spec.hidden_size, shape.outputs
    assert own is not None
    return StoredLightning(
        inputs=names.linear((own.inputs,), (3 * width,), hidden, False),
        gate=names.linear((own.gate,), (width,), hidden, False),
        norm=names.tensor(own.norm, width),
        output=names.linear((own.output,), (hidden,), width, False),
    )


def read_lightning(
    reader: TensorReader,
    stored: StoredLightning,
    shape: LightningShape,
    norm: StoredNorm | None,
) -> LightningWeights:
    """Read a layer's lightning attention.

    shape: that of the whole model; norm: the norm whose output it reads.
    """
    shard, outputs = reader.shard, shape.outputs

    def product(linear: StoredLinear) -> Projection:
        ((weight, bias),) = reader.linear(linear, norm)
        mine = shard.rows(torch.arange(weight.shape[0]))
        part = reader.product([take_rows((weight, bias), mine)], reader.operators_of(linear))
        return reader.adapted(part, reader.site(linear, norm, mine))

    rates = 2.0 ** (-8 / shape.heads * torch.arange(1, shape.heads + 1)) * shape.slope
    weight = shard.rows(reader.tensor(stored.norm))
    return LightningWeights(
        inputs=product(stored.inputs),
        gate=product(stored.gate),
        decays=-shard.rows(rates).view(-1, 1, 1).to(reader.device, torch.float32),
        norm=GatedNorm(
            weight.to(reader.device, torch.float32, copy=True),
            width=shape.norm_width,
            epsilon=_EPSILON,
            norms_first=True,
            ranks=norm_ranks(outputs, shape.norm_width, shard),
            gate=OutputGate.SIGMOID,
        ),
        output=reader.residual_projection(stored.output),
    )
