"""Weights of the parts of Inkling's layers: their names and shapes, and their loading."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.model.architecture.layers import (
    AttentionSpec,
    ConvolvedFeedForward,
    ExpertsSpec,
)
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.attention_weights import (
    StoredAttention,
    read_attention,
    stored_attention,
)
from services.engine.model.mixers.convolved import ConvolvedWeights
from services.engine.model.mixers.relative_mixer import RelativeWeights
from services.engine.model.parts.feed_forward_reader import FeedForwardReader
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.stored_feed_forward import StoredFeedForward, stored_feed_forward
from services.engine.model.parts.tensor_reader import TensorReader, shard_rows

__all__ = [
    "StoredConvolved",
    "StoredRelative",
    "read_convolved",
    "read_relative",
    "stored_convolved",
    "stored_relative",
]


@dataclass(frozen=True, slots=True)
class StoredRelative:
    attention: StoredAttention
    states: StoredLinear
    table: StoredTensor
    keys: StoredTensor
    values: StoredTensor
    output: StoredTensor


@dataclass(frozen=True, slots=True)
class StoredConvolved:
    content: StoredFeedForward
    convolution: StoredTensor
    scale: StoredTensor
    """Factor of the output"""


def stored_relative(names: LayerNames, spec: AttentionSpec) -> StoredRelative:
    """Name the tensors of a layer's attention with addends by distance."""
    own, hidden, relative = names.names.relative, names.spec.hidden_size, spec.relative
    assert own is not None
    assert relative is not None
    cached = spec.num_kv_heads * spec.head_dim
    keys, values, output = (
        names.tensor(f"{name}.weight", channels, 1, relative.conv_width)
        for name, channels in ((own.keys, cached), (own.values, cached), (own.output, hidden))
    )
    outputs = (spec.num_heads * relative.rank,)
    return StoredRelative(
        attention=stored_attention(names, spec),
        states=names.linear((own.states,), outputs, hidden, False),
        table=names.tensor(own.table, relative.rank, relative.extent),
        keys=keys,
        values=values,
        output=output,
    )


def stored_convolved(names: LayerNames, spec: ConvolvedFeedForward) -> StoredConvolved:
    """Name the tensors of a feed-forward layer whose output is convolved."""
    own = names.names.relative
    assert own is not None
    content = stored_feed_forward(names, spec.content)
    assert content is not None
    has_experts = isinstance(spec.content, ExpertsSpec)
    width = (names.spec.hidden_size, 1, spec.conv_width)
    return StoredConvolved(
        content=content,
        convolution=names.tensor(f"{own.feed_forward}.weight", *width),
        scale=names.tensor(own.experts_scale if has_experts else own.dense_scale, 1),
    )


def read_relative(
    reader: TensorReader, stored: StoredRelative, spec: AttentionSpec, norm: StoredNorm | None
) -> RelativeWeights:
    """Read a layer's attention with addends by distance. Each rank has its heads, and the whole
    convolution of the output.

    spec: its shape in the whole model; norm: the norm whose output it reads.
    """
    attention = read_attention(reader, stored.attention, spec, norm)
    assert attention.head_norms is not None
    order = reader.shard.rows(torch.arange(stored.states.weights[0].shape[0]))
    states = reader.product(
        [shard_rows(part, reader.shard) for part in reader.linear(stored.states, norm)],
        reader.operators_of(stored.states),
    )
    heads = reader.shard.of_heads(spec.num_kv_heads)
    keys, values, output = (
        _factors(reader, each) for each in (stored.keys, stored.values, stored.output)
    )
    return RelativeWeights(
        attention=replace(attention, head_norms=None),
        norms=attention.head_norms,
        states=reader.adapted(states, reader.site(stored.states, norm, order)),
        table=reader.tensor(stored.table).to(reader.device, torch.float32, copy=True),
        keys=heads.rows(keys.T).T.contiguous(),
        values=heads.rows(values.T).T.contiguous(),
        output=output,
    )


def read_convolved(
    reader: TensorReader,
    stored: StoredConvolved,
    spec: ConvolvedFeedForward,
    norm: StoredNorm | None,
) -> ConvolvedWeights:
    """Read a feed-forward layer whose output is convolved. Every rank has the whole convolution.

    spec: its shape in the whole model; norm: the norm whose output it reads.
    """
    scale = reader.tensor(stored.scale).float().item()
    content = FeedForwardReader(reader).read(stored.content, spec.content, norm, None)
    return ConvolvedWeights(content, _factors(reader, stored.convolution) * scale)


def _factors(reader: TensorReader, stored: StoredTensor) -> Tensor:
    """Return a convolution's factors, float32 [width, channels], plus 1 for the newest token,
    because the convolution adds to its input."""
    factors = reader.tensor(stored).float().flatten(1).T.contiguous()
    factors[-1] += 1
    return factors.to(reader.device)
