"""Tensors that a checkpoint must hold, by name, shape and role."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.engine.model.architecture.delta_shape import DeltaShape
from services.engine.model.architecture.layers import (
    AttentionSpec,
    ConvolvedFeedForward,
    MixerSpec,
    NoFeedForward,
    NoMixer,
)
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.family import TensorNames
from services.engine.model.checkpoint.tensors import StoredTensor, TensorFiles
from services.engine.model.mixers.stored import StoredMixer, stored_mixer
from services.engine.model.parts.stored import (
    LayerNames,
    StoredLinear,
    StoredNorm,
    stored_norm,
    stored_tensors,
)
from services.engine.model.parts.stored_altup import StoredAltUp, stored_altup
from services.engine.model.parts.stored_feed_forward import StoredFeedForward, stored_feed_forward
from services.engine.model.parts.stored_hyper import StoredHyper, stored_hyper
from services.engine.model.parts.stored_modal import StoredModalTokens, stored_modal_tokens
from services.engine.model.parts.stored_shared_block import StoredSharedBlock, stored_shared_block

__all__ = ["Manifest", "StoredLayer", "find_root", "stored_layer"]


@dataclass(frozen=True, slots=True)
class StoredLayer:
    mixer_norm: StoredNorm | None
    mixer: StoredMixer | None
    mixer_post_norm: StoredNorm | None
    feed_forward_norm: StoredNorm | None
    feed_forward: StoredFeedForward | None
    feed_forward_post_norm: StoredNorm | None
    input: "StoredLayerInput | None"
    scalar: StoredTensor | None
    altup: StoredAltUp | None
    hyper: StoredHyper | None
    shared_block: StoredSharedBlock | None


@dataclass(frozen=True, slots=True)
class StoredLayerInput:
    gate: StoredLinear
    output: StoredLinear
    post_norm: StoredNorm


@dataclass(frozen=True, slots=True)
class StoredLayerInputs:
    table: StoredTensor
    projection: StoredLinear
    norm: StoredTensor


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every tensor of a checkpoint."""

    root: str
    """Beginning of the decoder's tensor names"""
    embedding: StoredTensor
    embedding_norm: StoredNorm | None
    positions: StoredTensor | None
    layers: tuple[StoredLayer, ...]
    final_norm: StoredNorm
    head: StoredTensor | None
    """Output projection; None: the embedding serves as such"""
    head_bias: StoredTensor | None
    layer_inputs: StoredLayerInputs | None
    modal_tokens: tuple[StoredModalTokens, ...]

    @staticmethod
    def of(spec: ModelSpec, root: str) -> "Manifest":
        """List the tensors of `spec`, whose names begin with `root`, one of its family's roots."""
        names = spec.family.names
        positions = None
        if names.positions is not None:
            shape = (spec.context_length + spec.position_offset, spec.hidden_size)
            positions = StoredTensor(f"{root}{names.positions}.weight", shape)
        table = (spec.stored_vocab_size or spec.vocab_size, spec.hidden_size)
        return Manifest(
            root=root,
            embedding=StoredTensor(f"{root}{names.embedding}.weight", table),
            embedding_norm=None
            if names.embedding_norm is None
            else stored_norm(spec, f"{root}{names.embedding_norm}"),
            positions=positions,
            layers=tuple(stored_layer(spec, index, root) for index in range(spec.num_layers)),
            final_norm=stored_norm(spec, f"{root}{names.final_norm}"),
            head=None
            if spec.tied_embeddings
            else StoredTensor(f"{names.roots[root]}.weight", table),
            head_bias=StoredTensor(f"{names.roots[root]}.bias", (spec.vocab_size,))
            if spec.head_bias
            else None,
            layer_inputs=_layer_inputs(spec, root) if spec.input_width else None,
            modal_tokens=tuple(stored_modal_tokens(spec, each) for each in spec.modal_tokens),
        )

    def tensors(self) -> Iterator[StoredTensor]:
        """Yield each tensor once, also those that several layers share."""
        yield from dict.fromkeys(stored_tensors(self))


def find_root(files: TensorFiles, names: TensorNames) -> str:
    """Return the root under which files hold the embeddings; the first root if none holds them."""
    held = (root for root in names.roots if files.holds(f"{root}{names.embedding}.weight"))
    return next(held, next(iter(names.roots)))


def stored_layer(spec: ModelSpec, index: int, root: str) -> StoredLayer:
    """Name the tensors of a layer. root: beginning of the decoder's tensor names."""
    own, layer = spec.family.names, spec.layers[index]
    if isinstance(layer.mixer, DeltaShape):
        own = own.in_delta_layers
    below = f"{root}{own.layers}."
    names = LayerNames(spec, f"{below}{layer.place or index}.", layer.sublayer)
    mixer_post_norm, altup = names.norm(own.attention_post_norm), None
    if layer.altup is not None:
        assert mixer_post_norm is not None
        mixer_post_norm = replace(mixer_post_norm, factor=0.5**0.5)
        altup = stored_altup(names, LayerNames(spec, root), layer.altup, index)
    shares_norm = spec.parallel_residual and spec.family.shares_norm
    return StoredLayer(
        mixer_norm=names.norm(own.feed_forward_norm)
        if isinstance(layer.mixer, ConvolvedFeedForward)
        else _mixer_norm(names, own.attention_norm, layer.mixer),
        mixer=stored_mixer(names, layer.mixer),
        mixer_post_norm=mixer_post_norm,
        feed_forward_norm=None
        if isinstance(layer.feed_forward, NoFeedForward)
        else names.norm(own.attention_norm if shares_norm else own.feed_forward_norm),
        feed_forward=stored_feed_forward(names, layer.feed_forward),
        feed_forward_post_norm=names.norm(own.feed_forward_post_norm),
        input=_layer_input(names, layer.input_width) if layer.input_width else None,
        scalar=names.tensor(own.layer_scalar, 1) if layer.has_scalar else None,
        altup=altup,
        hyper=None if layer.hyper is None else stored_hyper(names, LayerNames(spec, root), index),
        shared_block=None
        if layer.shared_block is None
        else stored_shared_block(names, LayerNames(spec, below), layer),
    )


def _mixer_norm(names: LayerNames, name: str | None, mixer: MixerSpec) -> StoredNorm | None:
    if isinstance(mixer, NoMixer):
        return None
    if isinstance(mixer, AttentionSpec) and mixer.input_width:
        return StoredNorm(names.tensor(f"{name}.weight", mixer.input_width), None)
    return names.norm(name)


def _layer_input(names: LayerNames, width: int) -> StoredLayerInput:
    own, hidden = names.names.layer_inputs, names.spec.hidden_size
    return StoredLayerInput(
        gate=names.linear((own.gate,), (width,), hidden, False),
        output=names.linear((own.output,), (hidden,), width, False),
        post_norm=names.required_norm(own.post_norm),
    )


def _layer_inputs(spec: ModelSpec, root: str) -> StoredLayerInputs:
    own, names = spec.family.names.layer_inputs, LayerNames(spec, root)
    width = spec.num_layers * spec.input_width
    return StoredLayerInputs(
        table=names.tensor(f"{own.table}.weight", spec.input_vocab_size, width),
        projection=names.linear((own.projection,), (width,), spec.hidden_size, False),
        norm=names.tensor(f"{own.norm}.weight", spec.input_width),
    )
