"""Weights of the indexer of sparse attention: their names and shapes, and their loading."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.checkpoint.quantized import decoded
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.indexer import IndexWeights
from services.engine.model.mixers.latent_products import ordered_product, pair_order
from services.engine.model.operators.interface import LayerNorm, Projection
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader

__all__ = ["StoredIndex", "exact_product", "read_index", "stored_index"]


@dataclass(frozen=True, slots=True)
class StoredIndex:
    queries: StoredLinear
    """Product that computes queries head by head: the numbers that rotate, then the rest"""
    keys: StoredLinear
    key_norm: StoredTensor
    key_norm_bias: StoredTensor
    head_weights: StoredLinear


def stored_index(names: LayerNames, spec: LatentSpec) -> StoredIndex | None:
    """Name the tensors of a layer's indexer; None: it has none."""
    latent, shape, hidden = names.names.latent, spec.index, names.spec.hidden_size
    if shape is None:
        return None
    assert latent is not None
    assert latent.index is not None
    own, outputs = latent.index, shape.num_heads * shape.width
    return StoredIndex(
        queries=names.linear((own.queries,), (outputs,), spec.query_width, False),
        keys=names.linear((own.keys,), (shape.width,), hidden, False),
        key_norm=names.tensor(f"{own.key_norm}.weight", shape.width),
        key_norm_bias=names.tensor(f"{own.key_norm}.bias", shape.width),
        head_weights=names.linear((own.head_weights,), (shape.num_heads,), hidden, False),
    )


def read_index(
    reader: TensorReader, stored: StoredIndex, spec: LatentSpec, norm: StoredNorm | None
) -> IndexWeights:
    """Read a layer's indexer, which every rank has whole. norm: norm that keys are made from."""
    order = _order(spec)
    weight, bias = (
        reader.norm_weight(reader.tensor(each)[order])
        for each in (stored.key_norm, stored.key_norm_bias)
    )
    return IndexWeights(
        queries=ordered_product(reader, stored.queries, None, _query_order(spec, order)),
        keys=ordered_product(reader, stored.keys, norm, order),
        key_norm=LayerNorm(weight, bias),
        head_weights=exact_product(reader, stored.head_weights, norm),
    )


def exact_product(
    reader: TensorReader, stored: StoredLinear, norm: StoredNorm | None
) -> Projection:
    """Read a product that is not rounded, because it takes part in a choice, as routers do."""
    ((weight, bias),) = reader.linear(stored, norm)
    product = reader.operators.exact_projection(decoded(weight), bias)
    reader.step_bytes += product.weight_bytes
    return reader.adapted(product, reader.site(stored, norm))


def _order(spec: LatentSpec) -> Tensor:
    """Return the order of a key's stored numbers that puts RoPE pairs half their width apart."""
    assert spec.index is not None
    rotating = pair_order(spec.shared_width, is_interleaved=spec.index.is_interleaved)
    return torch.cat((rotating, torch.arange(spec.shared_width, spec.index.width)))


def _query_order(spec: LatentSpec, order: Tensor) -> Tensor:
    """Return the stored outputs that rotate in all heads, then the rest."""
    assert spec.index is not None
    heads = torch.arange(spec.index.num_heads)[:, None] * spec.index.width + order
    rotating, rest = heads[:, : spec.shared_width], heads[:, spec.shared_width :]
    return torch.cat((rotating.flatten(), rest.flatten()))
