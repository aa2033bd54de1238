"""Tensors that a checkpoint must hold, by name, shape and role."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.tensors import StoredTensor
from services.engine.model.mixers.stored import StoredMixer, stored_mixer
from services.engine.model.stored import LayerNames, StoredNorm, stored_norm
from services.engine.model.stored_feed_forward import StoredFeedForward, stored_feed_forward

__all__ = ["Manifest", "StoredLayer"]


@dataclass(frozen=True, slots=True)
class StoredLayer:
    mixer_norm: StoredNorm | None
    mixer: StoredMixer
    mixer_post_norm: StoredNorm | None
    feed_forward_norm: StoredNorm | None
    feed_forward: StoredFeedForward
    feed_forward_post_norm: StoredNorm | None


@dataclass(frozen=True, slots=True)
class Manifest:
    """Every tensor of a checkpoint."""

    root: str
    """Beginning of the decoder's tensor names"""
    embedding: StoredTensor
    positions: StoredTensor | None
    layers: tuple[StoredLayer, ...]
    final_norm: StoredNorm
    head: StoredTensor | None
    """None: the embedding serves as output projection"""
    head_bias: StoredTensor | None

    @staticmethod
    def of(spec: ModelSpec, root: str) -> "Manifest":
        """List the tensors of `spec`, whose names begin with `root`, one of its family's roots."""
        names = spec.family.names
        positions = None
        if names.positions is not None:
            shape = (spec.context_length, spec.hidden_size)
            positions = StoredTensor(f"{root}{names.positions}.weight", shape)
        table = (spec.vocab_size, spec.hidden_size)
        return Manifest(
            root=root,
            embedding=StoredTensor(f"{root}{names.embedding}.weight", table),
            positions=positions,
            layers=tuple(
                _layer(spec, index, LayerNames(spec, f"{root}{names.layers}.{index}."))
                for index in range(spec.num_layers)
            ),
            final_norm=stored_norm(spec, f"{root}{names.final_norm}"),
            head=None
            if spec.tied_embeddings
            else StoredTensor(f"{names.roots[root]}.weight", table),
            head_bias=StoredTensor(f"{names.roots[root]}.bias", (spec.vocab_size,))
            if spec.head_bias
            else None,
        )

    def tensors(self) -> Iterator[StoredTensor]:
        return _tensors(self)


def _layer(spec: ModelSpec, index: int, names: LayerNames) -> StoredLayer:
    own, layer = spec.family.names, spec.layers[index]
    shares_norm = spec.parallel_residual and spec.family.shares_norm
    return StoredLayer(
        mixer_norm=names.norm(own.attention_norm),
        mixer=stored_mixer(names, layer.mixer),
        mixer_post_norm=names.norm(own.attention_post_norm),
        feed_forward_norm=names.norm(own.attention_norm if shares_norm else own.feed_forward_norm),
        feed_forward=stored_feed_forward(names, layer.feed_forward),
        feed_forward_post_norm=names.norm(own.feed_forward_post_norm),
    )


def _tensors(part: object) -> Iterator[StoredTensor]:
    if isinstance(part, StoredTensor):
        yield part
    elif isinstance(part, tuple):
        for item in part:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            yield from _tensors(getattr(part, field.name))
