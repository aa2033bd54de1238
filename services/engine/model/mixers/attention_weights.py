"""Weights of attention: their names and shapes, and their loading.

Partial RoPE becomes full RoPE with some angles of 0: the rows of queries and keys are reordered so
that the two dimensions of a pair lie half a head apart.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.architecture.distance import alibi_slopes
from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.architecture.rotary import RotarySpec
from services.engine.model.checkpoint.family import QkNorm, TensorNames
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.attention import AttentionWeights
from services.engine.model.operators.interface import HeadNorms, Projection
from services.engine.model.parts.shard import Shard
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import (
    TensorReader,
    shard_rows,
    split_parts,
    take_rows,
)

__all__ = ["StoredAttention", "read_attention", "stored_attention", "to_half_split"]

_VALUES = 2
"""Index of values after queries and keys"""


@dataclass(frozen=True, slots=True)
class StoredAttention:
    qkv: StoredLinear
    query_norm: tuple[StoredTensor, ...]
    """Norm of queries: one tensor, or one for each head; empty: there is no norm"""
    key_norm: tuple[StoredTensor, ...]
    sinks: StoredTensor | None
    output: StoredLinear


def stored_attention(names: LayerNames, spec: AttentionSpec) -> StoredAttention:
    """Name the tensors of a layer's attention."""
    own, hidden = names.names, names.spec.hidden_size
    inputs = spec.input_width or hidden
    attended = spec.num_heads * spec.value_dim
    widths = _widths(own, spec)
    qkv = own.qkv if len(own.qkv) == 1 else own.qkv[: len(widths)]
    if own.output_gate is not None:
        qkv = (*qkv, own.output_gate)
    has_keys = spec.reads_layer is None
    return StoredAttention(
        qkv=names.linear(qkv, widths, inputs, spec.qkv_bias),
        query_norm=_stored_norm(names, own.query_norm, spec, spec.num_heads),
        key_norm=_stored_norm(names, own.key_norm, spec, spec.num_kv_heads) if has_keys else (),
        sinks=None
        if own.sinks is None or not spec.has_sinks
        else names.tensor(own.sinks, spec.num_heads),
        output=names.linear((own.output,), (hidden,), attended, spec.output_bias),
    )


def read_attention(
    reader: TensorReader,
    stored: StoredAttention,
    spec: AttentionSpec,
    norm: StoredNorm | None,
) -> AttentionWeights:
    """Read a layer's attention.

    spec: its shape in the whole model; norm: the norm whose output it reads.
    """
    qkv = _qkv(reader, stored, spec, norm)
    query_norm, key_norm = _qk_norms(reader, stored, spec)
    head_norms = None
    if spec.qk_norm is QkNorm.ALL_HEADS:
        qkv, query_norm, key_norm = reader.shard.normed_heads(
            qkv, query_norm, key_norm, reader.spec.norm_epsilon, reader.operators
        )
    if query_norm is not None and key_norm is not None and _norms_apart(spec):
        centers = spec.qk_norm is QkNorm.HEAD_LAYER_NORM
        head_norms, query_norm, key_norm = HeadNorms(query_norm, key_norm, centers), None, None
    return AttentionWeights(
        qkv=qkv,
        query_norm=query_norm,
        key_norm=key_norm,
        head_norms=head_norms,
        value_norm=_value_norm(reader, spec),
        sinks=None if stored.sinks is None else _sinks(reader, stored.sinks),
        output=reader.residual_projection(stored.output),
        slopes=_slopes(reader, spec) if spec.alibi_bias else None,
    )


def _stored_norm(
    names: LayerNames, name: str, spec: AttentionSpec, heads: int
) -> tuple[StoredTensor, ...]:
    size = spec.head_dim
    match spec.qk_norm:
        case QkNorm.NONE | QkNorm.HEAD_UNWEIGHTED:
            return ()
        case QkNorm.HEAD | QkNorm.HEAD_ROTATED:
            return (names.tensor(f"{name}.weight", size),)
        case QkNorm.ALL_HEADS:
            return (names.tensor(f"{name}.weight", heads * size),)
        case QkNorm.HEAD_LAYER_NORM:
            if "{}" not in name:
                return (names.tensor(f"{name}.weight", heads, size),)
            numbers = range(heads)
            return tuple(names.tensor(f"{name.format(n)}.weight", size) for n in numbers)


def _norms_apart(spec: AttentionSpec) -> bool:
    """Return whether the norms of queries and keys are computed apart from the rotation."""
    fused = (QkNorm.HEAD, QkNorm.ALL_HEADS)
    return spec.rotary is None or spec.qk_norm not in fused


def _qkv(
    reader: TensorReader, stored: StoredAttention, spec: AttentionSpec, norm: StoredNorm | None
) -> Projection:
    """Read this rank's output gates, queries, keys and values as one product."""
    shard, keys = reader.shard, reader.shard.of_heads(spec.num_kv_heads)
    widths = _widths(reader.spec.family.names, spec)
    whole, stored_parts = torch.arange(sum(widths)), reader.linear(stored.qkv, norm)
    if reader.spec.family.qkv_by_head:
        heads = whole.view(spec.num_kv_heads, -1, spec.head_dim)
        by_kind = (heads[:, :-2], heads[:, -2], heads[:, -1])
        whole = torch.cat([part.flatten() for part in by_kind])
        stored_parts = [take_rows(part, whole) for part in stored_parts]
    stored_parts = split_parts(stored_parts, widths)
    places = whole.split_with_sizes(widths)
    shards = [keys if part in (1, 2) else shard for part in range(len(widths))]
    parts = [shard_rows(*each) for each in zip(stored_parts, shards, strict=True)]
    rows = [each.rows(place) for each, place in zip(shards, places, strict=True)]
    taken, order = [], []
    for number, index in _rows_in_order(reader, spec, [len(each) for each in rows]):
        taken.append(take_rows(parts[number], index))
        order.append(rows[number][index])
    product = reader.product(taken, reader.operators_of(stored.qkv))
    return reader.adapted(product, reader.site(stored.qkv, norm, torch.cat(order)))


def _widths(names: TensorNames, spec: AttentionSpec) -> tuple[int, ...]:
    """Return the widths of the stored queries, keys and values that the layer has.

    The width of an output gate with a tensor of its own follows.
    """
    queries = spec.num_heads * spec.head_dim
    has_own = names.output_gate is not None
    if spec.gate is not None and not has_own:
        queries *= 2
    keys, values = (spec.num_kv_heads * width for width in (spec.head_dim, spec.value_dim))
    count = 0 if spec.reads_layer is not None else 1 if spec.keys_are_values else 2
    return (queries, *(keys, values)[:count], *(spec.num_gates,) * has_own)


def _rows_in_order(
    reader: TensorReader, spec: AttentionSpec, widths: Sequence[int]
) -> Iterator[tuple[int, Tensor]]:
    """Yield the parts of the product: the number of a stored part, and rows of it in order.

    widths: rows of the stored parts: queries, keys and values. Without values, keys serve as
    values; without keys there are neither. A head's output gate is stored after its queries, or all
    gates after the values. If a head has one gate, copies of gates fill up whole heads.
    """
    queries, *cached = map(torch.arange, widths)
    if len(cached) == _VALUES + 1:
        gates = len(cached.pop())
        padded = -(-gates // spec.head_dim) * spec.head_dim
        yield _VALUES + 1, torch.arange(padded) % gates
    elif spec.gate is not None:
        pairs = queries.view(-1, 2, spec.head_dim)
        queries = pairs[:, 0].flatten()
        yield 0, pairs[:, 1].flatten()
    yield 0, to_half_split(reader, queries, spec.head_dim, spec.rotary)
    if cached:
        yield 1, to_half_split(reader, cached[0], spec.head_dim, spec.rotary)
        yield len(cached), cached[-1]


def _qk_norms(
    reader: TensorReader, stored: StoredAttention, spec: AttentionSpec
) -> tuple[Tensor | None, Tensor | None]:
    """Read the norms of queries and of keys.

    They are [heads, head_dim] for LayerNorms, else [head_dim] or [heads * head_dim].
    """
    if spec.qk_norm is QkNorm.HEAD_UNWEIGHTED:
        ones = torch.ones(spec.head_dim, dtype=reader.dtype, device=reader.device)
        return ones, ones
    queries = keys = Shard()
    if spec.qk_norm in (QkNorm.ALL_HEADS, QkNorm.HEAD_LAYER_NORM):
        queries, keys = reader.shard, reader.shard.of_heads(spec.num_kv_heads)
    shape = (-1, spec.head_dim) if spec.qk_norm is QkNorm.HEAD_LAYER_NORM else (-1,)

    def read(norm: tuple[StoredTensor, ...], shard: Shard) -> Tensor | None:
        if not norm:
            return None
        weights = torch.cat([reader.tensor(each).flatten() for each in norm])
        rows = to_half_split(reader, weights, spec.head_dim, spec.rotary).view(shape)
        return reader.norm_weight(shard.rows(rows))

    return read(stored.query_norm, queries), read(stored.key_norm, keys)


def _value_norm(reader: TensorReader, spec: AttentionSpec) -> HeadNorms | None:
    if not spec.norms_values or spec.reads_layer is not None:
        return None
    ones = torch.ones(spec.value_dim, dtype=reader.dtype, device=reader.device)
    return HeadNorms(ones, ones, centers=False)


def _sinks(reader: TensorReader, sinks: StoredTensor) -> Tensor:
    return reader.shard.rows(reader.tensor(sinks)).to(reader.device, torch.float32, copy=True)


def _slopes(reader: TensorReader, spec: AttentionSpec) -> Tensor:
    slopes = alibi_slopes(spec.num_heads, spec.alibi_bias)
    return reader.shard.rows(slopes).to(reader.device, copy=True)


def to_half_split(
    reader: TensorReader, rows: Tensor, size: int, rotary: RotarySpec | None
) -> Tensor:
    """Reorder rows of heads of width `size` so that a RoPE pair's two lie half a head apart."""
    width = size if rotary is None else rotary.width
    is_interleaved = reader.spec.family.interleaved_rotary
    if width == size and not is_interleaved:
        return rows
    rotated, fixed = torch.arange(size).split_with_sizes((width, size - width))
    first, second = rotated.view(-1, 2).T if is_interleaved else rotated.view(2, -1)
    rest = fixed.view(2, -1)
    order = torch.cat((first, rest[0], second, rest[1]))
    return rows.reshape(-1, size, *rows.shape[1:])[:, order].reshape(rows.shape)
