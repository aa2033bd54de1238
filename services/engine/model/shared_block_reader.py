"""Reading of shared blocks, each once, and of the products that each depth adds to them."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from services.engine.model.architecture.layers import AttentionSpec, DenseSpec, LayerSpec
from services.engine.model.checkpoint.quantized import decoded
from services.engine.model.layer_stack import LayerWeights
from services.engine.model.manifest import StoredLayer
from services.engine.model.mixers.attention import AttentionWeights
from services.engine.model.mixers.attention_weights import StoredAttention, read_attention
from services.engine.model.operators.composed_projections import ChainedProjection
from services.engine.model.operators.interface import Projection
from services.engine.model.parts.feed_forward import Dense
from services.engine.model.parts.shard import Shard
from services.engine.model.parts.stored import StoredLinear, StoredNorm
from services.engine.model.parts.stored_feed_forward import StoredDense
from services.engine.model.parts.stored_shared_block import StoredLowRank, StoredSharedBlock
from services.engine.model.parts.tensor_reader import TensorReader, shard_rows, split_parts
from services.engine.model.shared_block import (
    BlockFeedForward,
    BlockResidual,
    DepthGate,
    DepthProjection,
)

__all__ = ["SharedBlockReader"]


@dataclass(frozen=True, slots=True)
class _SharedWeights:
    """Weights that all depths of a block have in common."""

    attention: AttentionWeights
    gate: Projection
    """Gate and up side by side"""
    down: Projection
    step_bytes: int


class SharedBlockReader:
    """Reader of all shared blocks of a checkpoint."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._plain = copy.copy(reader)
        """Reader of shared weights, without adapters: one would change them at one depth alone"""
        self._plain.adapters = None
        self._blocks: dict[StoredLinear, _SharedWeights] = {}
        """Common weights of each block, by the name of its attention's output"""

    def read(self, stored: StoredLayer, block: StoredSharedBlock, spec: LayerSpec) -> LayerWeights:
        """Read a depth. spec: its shape in the whole model; `block` is that of `stored`."""
        reader, mixer, dense = self._reader, spec.mixer, spec.feed_forward
        assert isinstance(mixer, AttentionSpec)
        assert isinstance(dense, DenseSpec)
        shared = self._shared(stored, mixer, dense)
        attention, width = shared.attention, dense.width // reader.shard.count
        keys = reader.shard.of_heads(mixer.num_kv_heads)
        heads = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)
        widths = [count * mixer.head_dim for count in heads]
        qkv = self._of_depth(attention.qkv, block.qkv, widths, [reader.shard, keys, keys])
        gate = self._of_depth(shared.gate, block.gate, [dense.width] * 2, [reader.shard] * 2)
        feed_forward = Dense(
            DepthGate(gate, dense.activation, width, reader.operators), shared.down
        )
        operators = reader.operators_of(block.output)
        output = reader.product(reader.linear(block.output, None), operators)
        output = reader.adapted(output, reader.site(block.output))
        return LayerWeights(
            mixer_norm=reader.norm(stored.mixer_norm),
            mixer=replace(attention, qkv=qkv),
            mixer_post_norm=None,
            feed_forward_norm=reader.norm(stored.feed_forward_norm),
            feed_forward=BlockFeedForward(feed_forward, output, reader.operators),
            residual=BlockResidual(),
        )

    def _shared(
        self, stored: StoredLayer, mixer: AttentionSpec, dense: DenseSpec
    ) -> _SharedWeights:
        """Return the common weights, which the block's first depth reads."""
        reader, attention, content = self._plain, stored.mixer, stored.feed_forward
        assert isinstance(attention, StoredAttention)
        assert isinstance(content, StoredDense)
        if attention.output not in self._blocks:
            reader.step_bytes = 0
            read = _SharedWeights(
                attention=read_attention(reader, attention, mixer, stored.mixer_norm),
                gate=self._gate(content, dense, stored.feed_forward_norm),
                down=reader.residual_projection(content.down),
                step_bytes=0,
            )
            self._blocks[attention.output] = replace(read, step_bytes=reader.step_bytes)
        shared = self._blocks[attention.output]
        self._reader.step_bytes += shared.step_bytes
        return shared

    def _gate(self, stored: StoredDense, dense: DenseSpec, norm: StoredNorm | None) -> Projection:
        reader = self._plain
        parts = split_parts(reader.linear(stored.gate, norm), [dense.width] * 2)
        mine = [shard_rows(part, reader.shard) for part in parts]
        return reader.product(mine, reader.operators_of(stored.gate))

    def _of_depth(
        self,
        shared: Projection,
        stored: StoredLowRank | None,
        widths: Sequence[int],
        shards: Sequence[Shard],
    ) -> Projection:
        """Return a product with a depth's addition to it.

        widths, shards: width and shard of each part of the outputs.
        """
        if stored is None:
            return shared
        reader = self._reader
        downs = [decoded(weight) for weight, _ in reader.linear(stored.down, None)]
        ups = [decoded(weight) for up in stored.up for weight, _ in reader.linear(up, None)]
        rank = sum(len(down) for down in downs)
        whole = torch.block_diag(*ups)  # type: ignore[no-untyped-call]
        parts = whole.split_with_sizes(list(widths))
        mine = torch.cat([each.rows(part) for each, part in zip(shards, parts, strict=True)])
        make = reader.operators.exact_projection
        first, second = make(torch.cat(downs), None), make(mine, None)
        own = ChainedProjection(first, second, rank, reader.operators)
        reader.step_bytes += own.weight_bytes
        return DepthProjection(shared, own)
