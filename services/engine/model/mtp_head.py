"""MTP layer of a checkpoint: its inputs, and its loading beside the model.

DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 2.2. The layer reads the model's final
hidden states behind their norm; further draft tokens read its own output behind its norm.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.architecture.layers import AttentionSpec, LayerSpec
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import choose_backend
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.progress import LoadProgress
from services.engine.model.checkpoint.tensors import TensorFiles
from services.engine.model.decoder import Decoder, DecoderWeights
from services.engine.model.draft_head import DraftHead, HeadInputs
from services.engine.model.loader import choose_operators, load_spec, open_tensors
from services.engine.model.manifest import Manifest, StoredLayer, stored_layer
from services.engine.model.operators.interface import Operators, Projection
from services.engine.model.operators.tiled_operators import TiledOperators
from services.engine.model.parts.shard import Shard
from services.engine.model.parts.stored import (
    LayerNames,
    StoredLinear,
    StoredNorm,
    stored_tensors,
)
from services.engine.model.parts.tensor_reader import TensorReader, take_columns
from services.engine.model.residual import ResidualRows
from services.engine.model.weight_reader import WeightReader

__all__ = ["holds_mtp", "load_mtp"]

_LOG = logging.getLogger("engine")


@dataclass(frozen=True, slots=True)
class _Format:
    """Names of an MTP layer's tensors, without .weight."""

    root: str
    """Beginning of all names"""
    layers: str
    """Name between the root and the layer's number"""
    number: int
    inputs: str
    """Beginning of the names below, behind the root"""
    projection: str
    embedding_norm: str
    states_norm: str
    final_norm: str
    may_share_norm: bool = False
    """True if files without the last norm share that of the model"""
    states_first: bool = False
    """True if the product reads the hidden states before the embedding"""


@dataclass(frozen=True, slots=True)
class _StoredHead:
    """Tensors of an MTP layer."""

    projection: StoredLinear
    embedding_norm: StoredNorm
    states_norm: StoredNorm
    final_norm: StoredNorm | None
    """Norm in front of the logits; None: that of the model"""
    layer: StoredLayer

    @staticmethod
    def of(spec: ModelSpec, files: TensorFiles, found: _Format) -> "_StoredHead":
        """List the tensors. spec: shape of the layer."""
        names = LayerNames(spec, f"{found.root}{found.inputs}")
        width = spec.hidden_size
        has_norm = files.holds(f"{found.root}{found.inputs}{found.final_norm}.weight")
        shares_norm = found.may_share_norm and not has_norm
        return _StoredHead(
            projection=names.linear((found.projection,), (width,), 2 * width, False),
            embedding_norm=names.required_norm(found.embedding_norm),
            states_norm=names.required_norm(found.states_norm),
            final_norm=None if shares_norm else names.required_norm(found.final_norm),
            layer=stored_layer(spec, 0, found.root),
        )


@dataclass(frozen=True, slots=True)
class MtpInputs(HeadInputs):
    """Inputs of an MTP layer: one product of the normed embedding and the normed hidden states."""

    projection: Projection
    """2 * hidden_size → hidden_size"""
    width: int
    embedding_norm: Tensor
    states_norm: Tensor
    target_norm: Tensor
    """Norm of the model's final hidden states"""
    own_norm: Tensor
    """Norm of the layer's own output"""
    epsilon: float
    operators: Operators

    def fill(self, embedded: Tensor, states: Tensor, rows: ResidualRows, *, is_own: bool) -> None:
        if not is_own:
            states = self._norm(states, self.target_norm)
        parts = self._norm(embedded, self.embedding_norm), self._norm(states, self.states_norm)
        joined = torch.cat(parts, dim=1)
        arranged = self.operators.temporary(*joined.shape)
        self.operators.arrange(joined, arranged)
        self.projection.into(arranged, rows.hidden)

    def following(self, hidden: Tensor) -> Tensor:
        return self._norm(hidden, self.own_norm)

    def _norm(self, rows: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(rows, weight.shape, weight, self.epsilon)


def holds_mtp(directory: Path, spec: ModelSpec) -> bool:
    """Return whether the files of a checkpoint hold an MTP layer.

    Logs why a layer can't be used, of which a tensor is missing or has another shape.
    """
    with open_tensors(directory, spec, drafts=True) as files:
        found = next((each for each in _formats(spec) if _is_held(files, each)), None)
        if found is None:
            return False
        try:
            stored = _StoredHead.of(_spec(files, spec, found), files, found)
            files.require(stored_tensors(stored), ("*",))
        except CheckpointError as error:
            _LOG.warning("the MTP layer makes no draft tokens: %s", error)
            return False
    return True


def load_mtp(directory: Path, target: Decoder, kv_dtype: str) -> DraftHead:
    """Load the first MTP layer of `target`, whose checkpoint is in `directory`.

    It shares the embeddings and the output projection. Raises CheckpointError if the files hold no
    such layer.
    """
    whole = target.spec if target.runs_alone else load_spec(directory)
    with open_tensors(directory, whole, drafts=True) as files:
        found = next((each for each in _formats(whole) if _is_held(files, each)), None)
        if found is None:
            raise CheckpointError(f"{directory}: no file holds an MTP layer.")
        spec = _spec(files, whole, found)
        stored = _StoredHead.of(spec, files, found)
        operators = choose_operators(spec, target.dtype, target.device, "full")
        tiled = isinstance(operators, TiledOperators)
        attention = choose_backend(
            spec, target.dtype, target.device, tiled=tiled, kv_dtype=kv_dtype
        )
        bar = LoadProgress(files.require(stored_tensors(stored), ("*",)), shown=False)
        reader = TensorReader(files, spec, target.dtype, target.device, operators, bar, Shard())
        reader.root = found.root
        layer = WeightReader(reader).layer(stored.layer, spec.layers[0])
        final_norm = target.final_norm
        if stored.final_norm is not None:
            final_norm = reader.norm_weight(reader.tensor(stored.final_norm.weight))
        inputs = MtpInputs(
            projection=_projection(reader, stored.projection, found),
            width=spec.hidden_size,
            embedding_norm=reader.norm_weight(reader.tensor(stored.embedding_norm.weight)),
            states_norm=reader.norm_weight(reader.tensor(stored.states_norm.weight)),
            target_norm=target.final_norm,
            own_norm=final_norm,
            epsilon=spec.norm_epsilon,
            operators=operators,
        )
        weights = DecoderWeights(
            embedding=target.embedding,
            positions=None,
            layers=(layer,),
            final_norm=final_norm,
            output=target.output if target.runs_alone else _whole_output(reader, whole),
            device=target.device,
            step_bytes=reader.step_bytes,
            layer_inputs=None,
            tokens=None,
        )
    return DraftHead(spec, target.dtype, weights, operators, attention, inputs)


def _formats(spec: ModelSpec) -> Iterator[_Format]:
    """Yield the formats in which files may hold the layer."""
    layers, number = spec.family.names.layers, spec.num_layers
    norms = ("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")  # of GGUF files
    yield _Format("", layers, number, f"{layers}.{number}.", "nextn.eh_proj", *norms, True)
    for root in spec.family.names.roots:
        behind = f"{layers}.{number}."  # of DeepSeek V3 and GLM-4.5
        norms = ("enorm", "hnorm", "shared_head.norm")
        yield _Format(root, layers, number, behind, "eh_proj", *norms)
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm")  # of MiMo
    for root in spec.family.names.roots:
        behind = "mtp_layers.0."
        yield _Format(root, "mtp_layers", 0, behind, "input_proj", *norms, states_first=True)
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")  # of Qwen3-Next
    yield _Format("mtp.", "layers", 0, "", "fc", *norms)


def _projection(reader: TensorReader, linear: StoredLinear, found: _Format) -> Projection:
    """Return the product of the embedding and the hidden states, side by side."""
    parts = reader.linear(linear, None)
    if found.states_first:
        ((weight, bias),) = parts
        columns = torch.arange(weight.shape[1]).roll(weight.shape[1] // 2)
        parts = [(take_columns(weight, columns), bias)]
    return reader.product(parts, reader.operators_of(linear))


def _whole_output(reader: TensorReader, whole: ModelSpec) -> Projection:
    """Read the output projection, of which each of several ranks has a part alone."""
    names = whole.family.names
    roots = (r for r in names.roots if reader.checkpoint.holds(f"{r}{names.embedding}.weight"))
    return WeightReader(reader).output(Manifest.of(whole, next(roots, next(iter(names.roots)))))


def _is_held(files: TensorFiles, found: _Format) -> bool:
    return files.holds(f"{found.root}{found.inputs}{found.states_norm}.weight")


def _spec(files: TensorFiles, whole: ModelSpec, found: _Format) -> ModelSpec:
    """Return the shape of the layer: that of the model's last layer of full attention."""
    layer = next((each for each in reversed(whole.layers) if _sees_all(each)), None)
    if layer is None:
        raise CheckpointError("no layer of the model sees all tokens, as an MTP layer does.")
    names = replace(whole.family.names, layers=found.layers)
    stacked = names.stacked_experts
    prefix = f"{found.root}{found.layers}.{found.number}."
    if stacked is not None and files.holds(f"{prefix}{stacked.down}"):
        names = replace(names, experts=stacked)
    return replace(
        whole,
        family=replace(whole.family, names=names),
        layers=(replace(layer, place=str(found.number)),),
    )


def _sees_all(layer: LayerSpec) -> bool:
    mixer = layer.mixer
    return isinstance(mixer, LatentSpec) or (isinstance(mixer, AttentionSpec) and not mixer.window)
