"""MTP layers of a checkpoint: their inputs, and their loading beside the model.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2. The first layer reads the model's
final hidden states behind their norm. Each further layer reads the output of the one before, behind
its norm. A single layer makes further draft tokens from its own output. The layers of MiMo V2 Flash
all read the model's final hidden states, in front of their norm.
"""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import choose_backend
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.repeated_tables import repeats
from services.engine.model.decoder import Decoder, DecoderWeights
from services.engine.model.draft_head import DraftHead, HeadInputs
from services.engine.model.embedding import Embedding
from services.engine.model.layered_head import HeadLayer, LayeredHead
from services.engine.model.loader import choose_operators, load_spec, open_tensors
from services.engine.model.manifest import Manifest, find_root
from services.engine.model.mtp_format import (
    MtpFormat,
    StoredMtpLayer,
    find_format,
    mtp_spec,
    stored_layers,
)
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.tiled_operators import TiledOperators
from services.engine.model.parts.shard import Shard
from services.engine.model.parts.stored import StoredLinear, stored_tensors
from services.engine.model.parts.tensor_reader import TensorReader, take_columns
from services.engine.model.residual import ResidualRows
from services.engine.model.weight_reader import WeightReader

__all__ = ["holds_mtp", "load_mtp"]

_LOG = logging.getLogger("engine")


@dataclass(frozen=True, slots=True)
class MtpInputs(HeadInputs):
    """Inputs of an MTP layer: one product of the normed embedding and the normed hidden states."""

    projection: Projection
    """2 * hidden_size → hidden_size"""
    width: int
    embedding_norm: Tensor
    states_norm: Tensor
    target_norm: Tensor | None
    """Norm of the model's final hidden states; None: the layer reads states without it"""
    own_norm: Tensor | None
    """Norm of the layer's own output; None: further draft tokens follow from output without it"""
    epsilon: float
    operators: Operators

    def fill(self, embedded: Tensor, states: Tensor, rows: ResidualRows, *, is_own: bool) -> None:
        if self.target_norm is not None and not is_own:
            states = self._norm(states, self.target_norm)
        parts = self._norm(embedded, self.embedding_norm), self._norm(states, self.states_norm)
        joined = torch.cat(parts, dim=1)
        arranged = self.operators.temporary(*joined.shape)
        self.operators.arrange(joined, arranged)
        self.projection.into(arranged, rows.hidden)

    def following(self, hidden: Tensor) -> Tensor:
        return hidden.clone() if self.own_norm is None else self._norm(hidden, self.own_norm)

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self.epsilon)


def holds_mtp(directory: Path, spec: ModelSpec) -> bool:
    """Return whether the files of a checkpoint hold MTP layers.

    Logs why layers can't be used, of which a tensor is missing or has another shape.
    """
    with open_tensors(directory, spec, drafts=True) as files:
        found = find_format(files, spec)
        if found is None:
            return False
        try:
            stored = stored_layers(mtp_spec(files, spec, found), files, found)
            files.require(stored_tensors(stored), ("*",))
        except CheckpointError as error:
            _LOG.warning("the MTP layer makes no draft tokens: %s", error)
            return False
    return True


def load_mtp(directory: Path, target: Decoder, kv_dtype: str) -> DraftHead:
    """Load the MTP layers of `target`, whose checkpoint is in `directory`.

    They share the embeddings and the output projection, unless the files hold other ones for them.
    Several layers make a `LayeredHead`. Raises CheckpointError if the files hold no such layer.
    """
    whole = target.spec if target.runs_alone else load_spec(directory)
    with open_tensors(directory, whole, drafts=True) as files:
        found = find_format(files, whole)
        if found is None:
            raise CheckpointError("no file of the model holds an MTP layer.")
        spec = mtp_spec(files, whole, found)
        stored = stored_layers(spec, files, found)
        operators = choose_operators(spec, target.dtype, target.device, "full")
        tiled = isinstance(operators, TiledOperators)
        attention = choose_backend(
            spec, target.dtype, target.device, tiled=tiled, kv_dtype=kv_dtype
        )
        bar = LoadProgress(files.require(stored_tensors(stored), ("*",)), shown=False)
        reader = TensorReader(files, spec, target.dtype, target.device, operators, bar, Shard())
        reader.root = found.root
        weights = WeightReader(reader)
        layers = tuple(map(weights.layer, (each.layer for each in stored), spec.layers))
        around = _LayerReader(reader, weights, found, target, whole)
        heads = [around.read(each) for each in stored]
        first = heads[0]
        held = DecoderWeights(
            embedding=first.embedding,
            positions=None,
            layers=layers,
            final_norm=first.final_norm,
            output=first.output,
            device=target.device,
            step_bytes=reader.step_bytes,
            layer_inputs=None,
            tokens=None,
        )
    if len(heads) == 1:
        return DraftHead(spec, target.dtype, held, operators, attention, first.inputs)
    return LayeredHead(
        spec, target.dtype, held, operators, attention, heads, is_chained=found.is_chained
    )


class _LayerReader:
    """Reader of the inputs, norms and tables around each MTP layer."""

    def __init__(
        self,
        reader: TensorReader,
        weights: WeightReader,
        found: MtpFormat,
        target: Decoder,
        whole: ModelSpec,
    ) -> None:
        """whole: shape of the model, of which `target` may be a part alone."""
        self._reader = reader
        self._weights = weights
        self._found = found
        self._target = target
        self._manifest = Manifest.of(whole, find_root(reader.checkpoint, whole.family.names))

    def read(self, stored: StoredMtpLayer) -> HeadLayer:
        """Read the tensors around one layer."""
        reader, target, found = self._reader, self._target, self._found
        final_norm = target.final_norm
        if stored.final_norm is not None:
            final_norm = reader.norm_weight(reader.tensor(stored.final_norm.weight))
        inputs = MtpInputs(
            projection=_projection(reader, stored.projection, found),
            width=reader.spec.hidden_size,
            embedding_norm=reader.norm_weight(reader.tensor(stored.embedding_norm.weight)),
            states_norm=reader.norm_weight(reader.tensor(stored.states_norm.weight)),
            target_norm=target.final_norm if found.norms_states else None,
            own_norm=final_norm if found.norms_states else None,
            epsilon=reader.spec.norm_epsilon,
            operators=reader.operators,
        )
        return HeadLayer(inputs, final_norm, self._embedding(stored), self._output(stored))

    def _embedding(self, stored: StoredMtpLayer) -> Embedding:
        own, table = stored.embedding, self._manifest.embedding
        if own is None or repeats(self._reader.checkpoint, own, table):
            return self._target.embedding
        return self._weights.embedding(own)

    def _output(self, stored: StoredMtpLayer) -> Projection:
        manifest, own = self._manifest, stored.output
        model_table = manifest.head or manifest.embedding
        if own is not None and not repeats(self._reader.checkpoint, own, model_table):
            return self._weights.output(replace(manifest, head=own, head_bias=None))
        if self._target.runs_alone:
            assert self._target.output is not None
            return self._target.output
        return self._whole_output

    @cached_property
    def _whole_output(self) -> Projection:
        """The output projection of the model, of which each of several ranks has a part alone."""
        return self._weights.output(self._manifest)


def _projection(reader: TensorReader, linear: StoredLinear, found: MtpFormat) -> Projection:
    """Return the product of the embedding and the hidden states, side by side."""
    parts = reader.linear(linear, None)
    if found.states_first:
        ((weight, bias),) = parts
        columns = torch.arange(weight.shape[1]).roll(weight.shape[1] // 2)
        parts = [(take_columns(weight, columns), bias)]
    return reader.product(parts, reader.operators_of(linear))
