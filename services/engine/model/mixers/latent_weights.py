"""Weights of multi-head latent attention: their names and shapes, and their loading."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.checkpoint.quantized import decoded
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.index_weights import StoredIndex, read_index, stored_index
from services.engine.model.mixers.latent_mixer import LatentWeights
from services.engine.model.mixers.latent_products import ordered_product, pair_order
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader

__all__ = ["StoredLatent", "read_latent_weights", "stored_latent"]


@dataclass(frozen=True, slots=True)
class StoredLatent:
    query_vectors: StoredLinear | None
    query_norm: StoredTensor | None
    queries: StoredLinear
    """Product that computes queries head by head: the own part, then the shared part"""
    latents: StoredLinear
    latent_norm: StoredTensor
    expansion: StoredLinear | tuple[StoredTensor, StoredTensor]
    """Product that computes keys and values head by head; or one tensor [heads, latent, key] and
    one [heads, value, latent]"""
    gate: StoredLinear | None
    """Product that computes a gate for each head; None: outputs have no gate"""
    output: StoredLinear
    index: StoredIndex | None
    """Tensors of the indexer; None: the layer has none"""


def stored_latent(names: LayerNames, spec: LatentSpec) -> StoredLatent:
    """Name the tensors of a layer's latent attention."""
    own, hidden, heads = names.names.latent, names.spec.hidden_size, spec.num_heads
    assert own is not None
    vectors, bias = spec.query_width, spec.has_bias
    queries = (own.query_up if vectors else own.queries,)
    output = (names.names.output,)
    return StoredLatent(
        query_vectors=names.linear((own.query_down,), (vectors,), hidden, bias)
        if vectors
        else None,
        query_norm=names.tensor(f"{own.query_norm}.weight", vectors) if vectors else None,
        queries=names.linear(queries, (heads * spec.head_width,), vectors or hidden, False),
        latents=names.linear((own.latents,), (spec.absorbed_width,), hidden, bias),
        latent_norm=names.tensor(f"{own.latent_norm}.weight", spec.latent_width),
        expansion=_stored_expansion(names, own.expansion, spec),
        gate=None
        if names.names.output_gate is None
        else names.linear((names.names.output_gate,), (heads,), hidden, False),
        output=names.linear(output, (hidden,), heads * spec.value_width, bias),
        index=stored_index(names, spec),
    )


def _stored_expansion(
    names: LayerNames, own: tuple[str, ...], spec: LatentSpec
) -> StoredLinear | tuple[StoredTensor, StoredTensor]:
    heads, latent = spec.num_heads, spec.latent_width
    if len(own) == 1:
        return names.linear(own, (heads * (spec.key_width + spec.value_width),), latent, False)
    keys, values = own
    return (
        names.tensor(f"{keys}.weight", heads, latent, spec.key_width),
        names.tensor(f"{values}.weight", heads, spec.value_width, latent),
    )


def read_latent_weights(
    reader: TensorReader,
    stored: StoredLatent,
    spec: LatentSpec,
    norm: StoredNorm | None,
) -> LatentWeights:
    """Read a layer's latent attention. Each rank has all latents, and the heads of its part.

    spec: its shape in the whole model; norm: the norm whose output it reads.
    """
    vectors = None
    if stored.query_vectors is not None:
        vectors = ordered_product(reader, stored.query_vectors, norm, None)
    keys, values = _expansion(reader, stored, spec)
    expansion = None
    if reader.adapters is not None and isinstance(stored.expansion, StoredLinear):
        order = _heads(reader, spec, spec.key_width + spec.value_width).flatten()
        expansion = reader.adapters.of_sequences(reader.site(stored.expansion, order=order))
    return LatentWeights(
        query_vectors=vectors,
        query_norm=None
        if stored.query_norm is None
        else _norm(reader, stored.query_norm, spec.query_factor),
        queries=ordered_product(
            reader,
            stored.queries,
            norm if vectors is None else None,
            _query_order(reader, spec),
        ),
        latents=ordered_product(reader, stored.latents, norm, _latent_order(spec)),
        latent_norm=_norm(reader, stored.latent_norm, spec.latent_factor),
        keys=keys,
        values=values,
        expansion=expansion,
        gate=None
        if stored.gate is None
        else ordered_product(reader, stored.gate, norm, _heads(reader, spec, 1).flatten()),
        output=reader.residual_projection(stored.output),
        index=None if stored.index is None else read_index(reader, stored.index, spec, norm),
    )


def _norm(reader: TensorReader, stored: StoredTensor, factor: float) -> Tensor:
    weight = reader.tensor(stored)
    return reader.norm_weight(weight if factor == 1 else weight.float() * factor)


def _expansion(
    reader: TensorReader, stored: StoredLatent, spec: LatentSpec
) -> tuple[Tensor, Tensor]:
    """Read the weights that make keys and values from latents, as in `LatentWeights`.

    Products with single heads need the numbers themselves, so codes are decoded.
    """
    if isinstance(stored.expansion, StoredLinear):
        ((weight, _),) = reader.linear(stored.expansion, None)
        heads = decoded(weight)[_heads(reader, spec, spec.key_width + spec.value_width)]
        keys, values = heads.split_with_sizes((spec.key_width, spec.value_width), dim=1)
    else:
        keys, values = (reader.shard.rows(reader.tensor(each)) for each in stored.expansion)
        keys = keys.transpose(1, 2)
    keys, values = (
        part.to(reader.device, reader.dtype, copy=True, memory_format=torch.contiguous_format)
        for part in (keys, values)
    )
    reader.step_bytes += keys.nbytes + values.nbytes
    return keys, values


def _heads(reader: TensorReader, spec: LatentSpec, width: int) -> Tensor:
    """Return the stored outputs of this rank's heads, [heads, width]."""
    return reader.shard.rows(torch.arange(spec.num_heads * width).view(spec.num_heads, width))


def _query_order(reader: TensorReader, spec: LatentSpec) -> Tensor:
    """Return the stored outputs of the own parts of this rank's heads, then of shared parts."""
    heads = _heads(reader, spec, spec.head_width)
    own, shared = heads.split_with_sizes((spec.key_width, spec.shared_width), dim=1)
    return torch.cat((own.flatten(), shared[:, _pairs(spec)].flatten()))


def _latent_order(spec: LatentSpec) -> Tensor:
    return torch.cat((torch.arange(spec.latent_width), spec.latent_width + _pairs(spec)))


def _pairs(spec: LatentSpec) -> Tensor:
    return pair_order(spec.shared_width, is_interleaved=spec.is_interleaved)
