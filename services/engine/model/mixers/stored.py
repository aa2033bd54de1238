"""Stored weights of mixers, by kind."""

from typing import TypeAlias

from services.engine.model.architecture.delta_shape import DeltaShape
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.architecture.layers import AttentionSpec, MixerSpec
from services.engine.model.mixers.attention_weights import (
    StoredAttention,
    read_attention,
    stored_attention,
)
from services.engine.model.mixers.delta_net_weights import (
    StoredDeltaNet,
    read_delta_net,
    stored_delta_net,
)
from services.engine.model.mixers.kinds import MixerWeights
from services.engine.model.mixers.latent_weights import (
    StoredLatent,
    read_latent_weights,
    stored_latent,
)
from services.engine.model.parts.stored import LayerNames, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader

__all__ = ["StoredMixer", "read_mixer", "stored_mixer"]

StoredMixer: TypeAlias = StoredAttention | StoredDeltaNet | StoredLatent


def stored_mixer(names: LayerNames, spec: MixerSpec) -> StoredMixer:
    """Name the tensors of a layer's mixer."""
    if isinstance(spec, DeltaShape):
        return stored_delta_net(names, spec)
    if isinstance(spec, LatentSpec):
        return stored_latent(names, spec)
    return stored_attention(names, spec)


def read_mixer(
    reader: TensorReader,
    stored: StoredMixer,
    spec: MixerSpec,
    norm: StoredNorm | None,
    post_norm: StoredNorm | None,
) -> MixerWeights:
    """Read a layer's mixer.

    spec: its shape in the whole model; norm: what it reads; post_norm: norm of what it adds to the
    residual.
    """
    if isinstance(stored, StoredDeltaNet):
        assert isinstance(spec, DeltaShape)
        return read_delta_net(reader, stored, spec, norm, post_norm)
    if isinstance(stored, StoredLatent):
        assert isinstance(spec, LatentSpec)
        return read_latent_weights(reader, stored, spec, norm, post_norm)
    assert isinstance(spec, AttentionSpec)
    return read_attention(reader, stored, spec, norm, post_norm)
