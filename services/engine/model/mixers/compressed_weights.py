"""Weights of compressed attention: their names and shapes, and their loading."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.architecture.compressed_spec import CompressedSpec, CompressionSpec
from services.engine.model.checkpoint.compressed_names import CompressorNames
from services.engine.model.checkpoint.quantized import decoded
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.compressed_mixer import CompressedWeights, EntryIndexWeights
from services.engine.model.mixers.compressor import CompressorWeights
from services.engine.model.mixers.index_weights import exact_product
from services.engine.model.mixers.latent_products import ordered_product
from services.engine.model.operators.interface import Projection
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader

__all__ = ["StoredCompressed", "read_compressed", "stored_compressed"]


@dataclass(frozen=True, slots=True)
class StoredCompressor:
    tokens: StoredLinear
    """Product that computes vectors, then their scores"""
    position_bias: StoredTensor
    norm: StoredTensor


@dataclass(frozen=True, slots=True)
class StoredEntryIndex:
    queries: StoredLinear
    head_weights: StoredLinear
    compressor: StoredCompressor


@dataclass(frozen=True, slots=True)
class StoredCompressed:
    query_vectors: StoredLinear
    query_norm: StoredTensor
    queries: StoredLinear
    keys: StoredLinear
    key_norm: StoredTensor
    sinks: StoredTensor
    groups: StoredLinear
    """[groups * group_width, heads of a group * head_dim]"""
    output: StoredLinear
    compressor: StoredCompressor | None
    index: StoredEntryIndex | None


def stored_compressed(names: LayerNames, spec: CompressedSpec) -> StoredCompressed:
    """Name the tensors of a layer's compressed attention."""
    own, hidden, width = names.names.compressed, names.spec.hidden_size, spec.head_dim
    assert own is not None
    vectors, inner, compression = spec.query_width, spec.groups * spec.group_width, spec.compression
    heads = spec.num_heads * width
    compressor = index = None
    if compression is not None:
        compressor = _stored_compressor(names, own.compressor, compression, width)
        shape = compression.index
        if shape is not None:
            outputs = shape.num_heads * shape.width
            index = StoredEntryIndex(
                names.linear((own.index_queries,), (outputs,), vectors, False),
                names.linear((own.index_weights,), (shape.num_heads,), hidden, False),
                _stored_compressor(names, own.index_compressor, compression, shape.width),
            )
    return StoredCompressed(
        query_vectors=names.linear((own.query_down,), (vectors,), hidden, False),
        query_norm=names.tensor(f"{own.query_norm}.weight", vectors),
        queries=names.linear((own.query_up,), (heads,), vectors, False),
        keys=names.linear((own.keys,), (width,), hidden, False),
        key_norm=names.tensor(f"{own.key_norm}.weight", width),
        sinks=names.tensor(own.sinks, spec.num_heads),
        groups=names.linear((own.groups,), (inner,), heads // spec.groups, False),
        output=names.linear((own.output,), (hidden,), inner, False),
        compressor=compressor,
        index=index,
    )


def _stored_compressor(
    names: LayerNames, own: CompressorNames, spec: CompressionSpec, width: int
) -> StoredCompressor:
    outputs, hidden = spec.series * width, names.spec.hidden_size
    return StoredCompressor(
        names.linear((own.vectors, own.scores), (outputs, outputs), hidden, False),
        names.tensor(own.position_bias, spec.rate, outputs),
        names.tensor(f"{own.norm}.weight", width),
    )


def read_compressed(
    reader: TensorReader,
    stored: StoredCompressed,
    spec: CompressedSpec,
    norm: StoredNorm | None,
) -> CompressedWeights:
    """Read a layer's compressed attention. Each rank has all keys, and the heads of its groups.

    spec: its shape in the whole model; norm: the norm whose output it reads.
    """
    heads = torch.arange(spec.num_heads * spec.head_dim).view(spec.num_heads, -1)
    sinks = reader.shard.rows(reader.tensor(stored.sinks))
    index = None
    if stored.index is not None:
        index = EntryIndexWeights(
            queries=ordered_product(reader, stored.index.queries, None, None),
            head_weights=exact_product(reader, stored.index.head_weights, norm),
            tokens=_tokens(reader, stored.index.compressor, norm),
            compressor=_compressor(reader, stored.index.compressor),
        )
    compressor = stored.compressor
    return CompressedWeights(
        query_vectors=ordered_product(reader, stored.query_vectors, norm, None),
        query_norm=reader.norm_weight(reader.tensor(stored.query_norm)),
        queries=ordered_product(reader, stored.queries, None, reader.shard.rows(heads).flatten()),
        keys=ordered_product(reader, stored.keys, norm, None),
        key_norm=reader.norm_weight(reader.tensor(stored.key_norm)),
        sinks=sinks.to(reader.device, torch.float32, copy=True),
        tokens=None if compressor is None else _tokens(reader, compressor, norm),
        compressor=None if compressor is None else _compressor(reader, compressor),
        index=index,
        groups=_groups(reader, stored.groups, spec),
        output=reader.residual_projection(stored.output),
    )


def _tokens(reader: TensorReader, stored: StoredCompressor, norm: StoredNorm | None) -> Projection:
    return reader.product(reader.linear(stored.tokens, norm), reader.operators_of(stored.tokens))


def _compressor(reader: TensorReader, stored: StoredCompressor) -> CompressorWeights:
    bias = reader.tensor(stored.position_bias)
    return CompressorWeights(
        bias.to(reader.device, torch.float32, copy=True),
        reader.norm_weight(reader.tensor(stored.norm)),
    )


def _groups(reader: TensorReader, stored: StoredLinear, spec: CompressedSpec) -> Tensor:
    """Read the product of each group's outputs, decoded because one product has all groups."""
    ((weight, _),) = reader.linear(stored, None)
    groups = reader.shard.rows(decoded(weight).view(spec.groups, spec.group_width, -1))
    groups = groups.to(
        reader.device, reader.dtype, copy=True, memory_format=torch.contiguous_format
    )
    reader.step_bytes += groups.nbytes
    return groups
