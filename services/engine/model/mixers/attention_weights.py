"""Weights of attention: their names and shapes, and their loading.

Partial RoPE becomes full RoPE with some angles of 0: the rows of queries and keys are reordered so
that the two dimensions of a pair lie half a head apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.checkpoint.families import QkNorm
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.attention import AttentionWeights
from services.engine.model.operators.interface import Projection
from services.engine.model.shard import Shard
from services.engine.model.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.tensor_reader import TensorReader, shard_rows, split_parts, take_rows

__all__ = ["StoredAttention", "read_attention", "stored_attention"]


@dataclass(frozen=True, slots=True)
class StoredAttention:
    qkv: StoredLinear
    query_norm: StoredTensor | None
    key_norm: StoredTensor | None
    sinks: StoredTensor | None
    output: StoredLinear


def stored_attention(names: LayerNames, spec: AttentionSpec) -> StoredAttention:
    """Name the tensors of a layer's attention."""
    own, hidden = names.names, names.spec.hidden_size
    attended, cached = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    queries = attended * (2 if spec.has_output_gate else 1)
    return StoredAttention(
        qkv=names.linear(own.qkv, (queries, cached, cached), hidden, spec.qkv_bias),
        query_norm=_stored_norm(names, own.query_norm, spec, attended),
        key_norm=_stored_norm(names, own.key_norm, spec, cached),
        sinks=None if own.sinks is None else names.tensor(own.sinks, spec.num_heads),
        output=names.linear((own.output,), (hidden,), attended, spec.output_bias),
    )


def read_attention(
    reader: TensorReader,
    stored: StoredAttention,
    spec: AttentionSpec,
    norm: StoredNorm | None,
    post_norm: StoredNorm | None,
) -> AttentionWeights:
    """Read a layer's attention.

    spec: its shape in the whole model; norm: what it reads; post_norm: norm of what it adds to the
    residual.
    """
    qkv = _qkv(reader, stored, spec, norm)
    query_norm, key_norm = _head_norms(reader, stored, spec)
    if reader.spec.family.qk_norm is QkNorm.ALL_HEADS:
        qkv, query_norm, key_norm = reader.shard.normed_heads(
            qkv, query_norm, key_norm, reader.spec.norm_epsilon, reader.operators
        )
    return AttentionWeights(
        qkv=qkv,
        query_norm=query_norm,
        key_norm=key_norm,
        sinks=None if stored.sinks is None else _sinks(reader, stored.sinks),
        output=reader.residual_projection(stored.output, post_norm),
    )


def _stored_norm(
    names: LayerNames, name: str, spec: AttentionSpec, width: int
) -> StoredTensor | None:
    kind = names.spec.family.qk_norm
    if kind is QkNorm.NONE:
        return None
    return names.tensor(f"{name}.weight", spec.head_dim if kind is QkNorm.HEAD else width)


def _qkv(
    reader: TensorReader, stored: StoredAttention, spec: AttentionSpec, norm: StoredNorm | None
) -> Projection:
    """Read this rank's queries, keys, values and then output gates as one product."""
    shard, keys = reader.shard, reader.shard.of_heads(spec.num_kv_heads)
    attended, cached = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    widths = [attended * (2 if spec.has_output_gate else 1), cached, cached]
    stored_parts = split_parts(reader.linear(stored.qkv, norm), widths)
    places = torch.arange(sum(widths)).split_with_sizes(widths)
    shards = (shard, keys, keys)
    parts = [shard_rows(*each) for each in zip(stored_parts, shards, strict=True)]
    rows = [each.rows(place) for each, place in zip(shards, places, strict=True)]
    taken, order = [], []
    for number, index in _rows_in_order(reader, spec, [len(each) for each in rows]):
        taken.append(take_rows(parts[number], index))
        order.append(rows[number][index])
    product = reader.product(taken, reader.operators_of(stored.qkv))
    return reader.adapted(product, reader.site(stored.qkv, norm, torch.cat(order)))


def _rows_in_order(
    reader: TensorReader, spec: AttentionSpec, widths: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the parts of the product: the number of a stored part, and rows of it in order.

    widths: rows of the stored queries, keys and values. A head's output gate is stored behind its
    queries.
    """
    queries, keys, values = map(torch.arange, widths)
    gates = None
    if spec.has_output_gate:
        pairs = queries.view(-1, 2, spec.head_dim)
        queries, gates = pairs[:, 0].flatten(), pairs[:, 1].flatten()
    yield 0, _to_half_split(reader, queries, spec)
    yield 1, _to_half_split(reader, keys, spec)
    yield 2, values
    if gates is not None:
        yield 0, gates


def _head_norms(
    reader: TensorReader, stored: StoredAttention, spec: AttentionSpec
) -> tuple[Tensor | None, Tensor | None]:
    """Read the norms of queries and of keys."""
    queries = keys = Shard()
    if reader.spec.family.qk_norm is QkNorm.ALL_HEADS:
        queries, keys = reader.shard, reader.shard.of_heads(spec.num_kv_heads)

    def read(norm: StoredTensor | None, shard: Shard) -> Tensor | None:
        if norm is None:
            return None
        rows = _to_half_split(reader, reader.tensor(norm), spec)
        return reader.norm_weight(shard.rows(rows))

    return read(stored.query_norm, queries), read(stored.key_norm, keys)


def _sinks(reader: TensorReader, sinks: StoredTensor) -> Tensor:
    return reader.shard.rows(reader.tensor(sinks)).to(reader.device, torch.float32, copy=True)


def _to_half_split(reader: TensorReader, rows: Tensor, spec: AttentionSpec) -> Tensor:
    """Reorder each head's rows so that the two of a RoPE pair lie half a head apart."""
    size, rotary = spec.head_dim, spec.rotary
    if reader.spec.family.interleaved_rotary:
        pairs = rows.reshape(-1, size // 2, 2, *rows.shape[1:])
        return pairs.transpose(1, 2).reshape(rows.shape)
    if rotary is None or rotary.width == size:
        return rows
    half, fixed = rotary.width // 2, (size - rotary.width) // 2
    first, second, *rest = torch.tensor_split(torch.arange(size), (half, 2 * half, size - fixed))
    order = torch.cat((first, rest[0], second, rest[1]))
    return rows.reshape(-1, size, *rows.shape[1:])[:, order].reshape(rows.shape)
