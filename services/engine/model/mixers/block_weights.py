"""Weights of attention to chosen blocks of tokens: their names and shapes, and their loading."""

from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.architecture.layers import AttentionSpec
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.attention_weights import (
    StoredAttention,
    read_attention,
    stored_attention,
    to_half_split,
)
from services.engine.model.mixers.block_mixer import BlockWeights
from services.engine.model.parts.stored import LayerNames, StoredLinear, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader, take_rows

__all__ = ["StoredBlocks", "read_blocks", "stored_blocks"]


@dataclass(frozen=True, slots=True)
class StoredBlocks:
    attention: StoredAttention
    index: StoredLinear
    """Product that computes queries head by head, then the key"""
    query_norm: StoredTensor
    key_norm: StoredTensor


def stored_blocks(names: LayerNames, spec: AttentionSpec) -> StoredBlocks:
    """Name the tensors of a layer that attends to chosen blocks."""
    own, hidden = names.names.block_index, names.spec.hidden_size
    assert own is not None
    assert spec.index is not None
    width = spec.index.width
    outputs = (spec.num_kv_heads * width, width)
    return StoredBlocks(
        attention=stored_attention(names, spec),
        index=names.linear((own.queries, own.keys), outputs, hidden, False),
        query_norm=names.tensor(f"{own.query_norm}.weight", width),
        key_norm=names.tensor(f"{own.key_norm}.weight", width),
    )


def read_blocks(
    reader: TensorReader, stored: StoredBlocks, spec: AttentionSpec, norm: StoredNorm | None
) -> BlockWeights:
    """Read a layer that attends to chosen blocks. Each rank has the queries of its key heads.

    spec: its shape in the whole model; norm: the norm whose output it reads.
    """
    assert spec.index is not None
    width = spec.index.width

    def ordered(rows: Tensor) -> Tensor:
        return to_half_split(reader, rows, width, spec.rotary)

    heads = spec.num_kv_heads * width
    mine = ordered(reader.shard.rows(torch.arange(heads))), ordered(torch.arange(width))
    parts = zip(reader.linear(stored.index, norm), mine, strict=True)
    product = reader.product(
        [take_rows(part, rows) for part, rows in parts], reader.operators_of(stored.index)
    )
    query_norm, key_norm = (
        reader.norm_weight(ordered(reader.tensor(each)))
        for each in (stored.query_norm, stored.key_norm)
    )
    order = torch.cat((mine[0], heads + mine[1]))
    return BlockWeights(
        attention=read_attention(reader, stored.attention, spec, norm),
        index=reader.adapted(product, reader.site(stored.index, norm, order)),
        query_norm=query_norm,
        key_norm=key_norm,
    )
