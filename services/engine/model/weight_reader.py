"""Conversion of a checkpoint's tensors to the decoder's weights."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import layer_norm, rms_norm

from services.engine.model.altup_reader import read_altup
from services.engine.model.architecture.layers import BesideSpec, LayerSpec, NoFeedForward
from services.engine.model.checkpoint.quantized import Weight, split
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.decoder import DecoderWeights
from services.engine.model.embedding import Embedding, StoredEmbedding, TensorEmbedding
from services.engine.model.hyper_reader import read_hyper_connections
from services.engine.model.layer_inputs import LayerInput, LayerInputs
from services.engine.model.layer_stack import LayerWeights
from services.engine.model.manifest import (
    Manifest,
    StoredLayer,
    StoredLayerInput,
    StoredLayerInputs,
)
from services.engine.model.mixers.stored import read_mixer
from services.engine.model.modal_reader import with_modal_tokens
from services.engine.model.operators.interface import Projection
from services.engine.model.parts.feed_forward_reader import FeedForwardReader
from services.engine.model.parts.stored import StoredNorm
from services.engine.model.parts.stored_feed_forward import StoredShortcut
from services.engine.model.parts.tensor_reader import TensorReader, without_mean
from services.engine.model.residual import NormedResidual, OneStream, Residual
from services.engine.model.shared_block import AfterBlock
from services.engine.model.shared_block_reader import SharedBlockReader
from services.engine.model.shortcut import ShortcutEnd, ShortcutStart

__all__ = ["WeightReader"]

_ROWS = 4096
"""Number of a table's rows that are normed at once"""


class WeightReader:
    """Reader of one checkpoint, a layer at a time."""

    def __init__(self, reader: TensorReader) -> None:
        self._reader = reader
        self._feed_forwards = FeedForwardReader(reader)
        self._shared_blocks = SharedBlockReader(reader)

    def read(self, manifest: Manifest) -> DecoderWeights:
        self._reader.root = manifest.root
        layers = tuple(map(self.layer, manifest.layers, self._reader.spec.layers))
        positions = (
            None if manifest.positions is None else self._own(self._table(manifest.positions))
        )
        output = self.output(manifest)
        embedding = (
            self.embedding(manifest.embedding)
            if manifest.embedding_norm is None
            else self._normed_embedding(manifest.embedding, manifest.embedding_norm)
        )
        modal_tokens = zip(manifest.modal_tokens, self._reader.spec.modal_tokens, strict=True)
        for stored, tokens in modal_tokens:
            embedding = with_modal_tokens(self._reader, stored, tokens, embedding)
        return DecoderWeights(
            embedding=embedding,
            positions=positions,
            layers=layers,
            final_norm=self._reader.norm_weight(self._reader.tensor(manifest.final_norm.weight)),
            output=self._reader.shard.gathered(output, self._reader.operators),
            device=self._reader.device,
            step_bytes=self._reader.step_bytes,
            layer_inputs=None
            if manifest.layer_inputs is None
            else self._layer_inputs(manifest.layer_inputs),
            tokens=self._feed_forwards.tokens,
        )

    def output(self, manifest: Manifest) -> Projection:
        """Read this rank's part of the output projection."""
        head = self._reader.shard.outputs(self._without_padding(self._head(manifest)))
        head_bias = None
        if manifest.head_bias is not None:
            head_bias = self._reader.shard.rows(self._reader.tensor(manifest.head_bias))
        head_bias = self._reader.with_norm_bias(head, head_bias, manifest.final_norm)
        return self._reader.projection([head], head_bias, self._reader.operators.for_logits())

    def _head(self, manifest: Manifest) -> Weight:
        if manifest.head is not None:
            return self._reader.weight(manifest.head, manifest.final_norm)
        quantized = self._reader.quantized(manifest.embedding, manifest.final_norm)
        return (
            self._reader.checkpoint.tensor(manifest.embedding) if quantized is None else quantized
        )

    def _without_padding(self, head: Weight) -> Weight:
        """Return the rows of the output projection that make logits."""
        vocab_size, rows = self._reader.spec.vocab_size, head.shape[0]
        return head if rows == vocab_size else split(head, [vocab_size, rows - vocab_size])[0]

    def layer(self, stored: StoredLayer, spec: LayerSpec) -> LayerWeights:
        """Read one layer."""
        if stored.shared_block is not None:
            return self._shared_blocks.read(stored, stored.shared_block, spec)
        mixer = read_mixer(self._reader, stored.mixer, spec.mixer, stored.mixer_norm)
        post_norm = stored.mixer_post_norm
        feed_forward = self._feed_forwards.read(
            stored.feed_forward,
            spec.feed_forward,
            stored.feed_forward_norm,
            stored.feed_forward_post_norm,
        )
        return LayerWeights(
            mixer_norm=self._reader.norm(stored.mixer_norm),
            mixer=mixer,
            mixer_post_norm=None if post_norm is None else self._reader.output_norm(post_norm),
            feed_forward_norm=self._reader.norm(stored.feed_forward_norm),
            feed_forward=feed_forward,
            residual=self._residual(stored, spec),
        )

    def _residual(self, stored: StoredLayer, spec: LayerSpec) -> Residual:
        reader = self._reader
        own = None if stored.input is None else self._layer_input(stored.input, spec)
        if stored.altup is not None:
            assert spec.altup is not None
            assert own is not None
            return read_altup(reader, stored.altup, spec.altup, own)
        if stored.hyper is not None:
            assert spec.hyper is not None
            return read_hyper_connections(reader, stored.hyper, spec.hyper)
        if spec.normed_factors is not None:
            return NormedResidual(reader.operators, spec.normed_factors)
        if spec.follows_block:
            return AfterBlock()
        if isinstance(stored.feed_forward, StoredShortcut):
            experts = self._feed_forwards.read_shortcut(
                stored.feed_forward, spec.feed_forward, stored.feed_forward_norm
            )
            return ShortcutStart(experts, reader.operators)
        if spec.follows_shortcut:
            return ShortcutEnd(reader.operators)
        scalar = 1.0 if stored.scalar is None else reader.tensor(stored.scalar).item()
        return OneStream(reader.operators, own, scalar)

    def _layer_inputs(self, stored: StoredLayerInputs) -> LayerInputs:
        reader, spec = self._reader, self._reader.spec
        projection = reader.product(
            reader.linear(stored.projection, None), reader.operators_of(stored.projection)
        )
        return LayerInputs(
            table=self.embedding(stored.table),
            projection=reader.adapted(projection, reader.site(stored.projection)),
            norm=reader.norm_weight(reader.tensor(stored.norm)),
            layers=spec.num_layers,
            width=spec.input_width,
            hidden_size=spec.hidden_size,
            epsilon=spec.norm_epsilon,
            operators=reader.operators,
            pad_token_id=spec.pad_token_id,
            num_ids=spec.input_vocab_size if spec.input_vocab_size < spec.vocab_size else 0,
        )

    def _layer_input(self, stored: StoredLayerInput, spec: LayerSpec) -> LayerInput:
        reader = self._reader
        output = reader.product(
            reader.linear(stored.output, None), reader.operators_of(stored.output)
        )
        content = spec.feed_forward
        dense = content.dense if isinstance(content, BesideSpec) else content
        assert not isinstance(dense, NoFeedForward)
        activation = replace(dense.activation, gated=False, cutoff=None)
        gate = reader.gate(
            reader.linear(stored.gate, None), activation, reader.operators_of(stored.gate)
        )
        if reader.adapters is not None:
            gate.adapt(reader.adapters.delta(reader.site(stored.gate)))
        return LayerInput(
            gate=gate,
            output=reader.adapted(output, reader.site(stored.output)),
            norm=reader.output_norm(stored.post_norm),
            operators=reader.operators,
        )

    def embedding(self, table: StoredTensor) -> Embedding:
        """Read a table of embeddings, from which a step takes the rows of its tokens."""
        reads_rows = self._reader.operators.keeps_groups and not self._reader.spec.family.layer_norm
        on_host = self._reader.device.type == "cpu"
        if reads_rows and on_host and (rows := self._reader.stored_rows(table)) is not None:
            return StoredEmbedding(rows)
        weight = self._table(table)
        if self._reader.device.type == "cpu" and not self._reader.spec.family.layer_norm:
            # A view of the mapped file: a step reads few rows, and the operating system may drop
            # the pages.
            return TensorEmbedding(weight)
        return TensorEmbedding(self._own(weight))

    def _normed_embedding(self, table: StoredTensor, norm: StoredNorm) -> Embedding:
        """Read a table whose rows have a norm, which is computed here, some rows at a time."""
        reader, epsilon = self._reader, self._reader.spec.norm_epsilon
        weight = reader.tensor(norm.weight).float()
        bias = None if norm.bias is None else reader.tensor(norm.bias).float()
        stored = reader.tensor(table)
        normed = torch.empty(stored.shape, dtype=reader.dtype, device=reader.device)
        for first in range(0, len(stored), _ROWS):
            part = slice(first, first + _ROWS)
            rows = stored[part].float()
            if reader.spec.family.layer_norm:
                rows = without_mean(layer_norm(rows, weight.shape, weight, bias, epsilon), 1)
            else:
                rows = rms_norm(rows, weight.shape, weight, epsilon)
            normed[part] = rows
        return TensorEmbedding(normed)

    def _table(self, table: StoredTensor) -> Tensor:
        weight = self._reader.tensor(table)
        return without_mean(weight, 1) if self._reader.spec.family.layer_norm else weight

    def _own(self, table: Tensor) -> Tensor:
        return table.to(self._reader.device, self._reader.dtype)
