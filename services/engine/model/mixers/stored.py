"""Stored weights of mixers, by kind."""

from dataclasses import dataclass
from typing import TypeAlias

from services.engine.model.architecture.compressed_spec import CompressedSpec
from services.engine.model.architecture.convolution_shape import ConvolutionShape
from services.engine.model.architecture.delta_shape import DeltaShape
from services.engine.model.architecture.gated_unit_shape import GatedUnitShape
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.architecture.layers import (
    AttentionSpec,
    ConvolvedFeedForward,
    MixerSpec,
    NoMixer,
    ParallelSpec,
)
from services.engine.model.architecture.lightning_shape import LightningShape
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.mixers.attention_weights import (
    StoredAttention,
    read_attention,
    stored_attention,
)
from services.engine.model.mixers.block_weights import (
    StoredBlocks,
    read_blocks,
    stored_blocks,
)
from services.engine.model.mixers.compressed_weights import (
    StoredCompressed,
    read_compressed,
    stored_compressed,
)
from services.engine.model.mixers.convolution_weights import (
    StoredConvolution,
    read_convolution,
    stored_convolution,
)
from services.engine.model.mixers.delta_net_weights import (
    StoredDeltaNet,
    read_delta_net,
    stored_delta_net,
)
from services.engine.model.mixers.gated_unit_weights import (
    StoredGatedUnit,
    read_gated_unit,
    stored_gated_unit,
)
from services.engine.model.mixers.kinds import MixerWeights, ParallelWeights
from services.engine.model.mixers.latent_weights import (
    StoredLatent,
    read_latent_weights,
    stored_latent,
)
from services.engine.model.mixers.lightning_weights import (
    StoredLightning,
    read_lightning,
    stored_lightning,
)
from services.engine.model.mixers.mamba_weights import StoredMamba, read_mamba, stored_mamba
from services.engine.model.mixers.relative_weights import (
    StoredConvolved,
    StoredRelative,
    read_convolved,
    read_relative,
    stored_convolved,
    stored_relative,
)
from services.engine.model.mixers.selective_weights import (
    StoredSelective,
    read_selective,
    stored_selective,
)
from services.engine.model.parts.stored import LayerNames, StoredNorm
from services.engine.model.parts.tensor_reader import TensorReader

__all__ = ["StoredMixer", "read_mixer", "stored_mixer"]


@dataclass(frozen=True, slots=True)
class StoredParallel:
    attention: StoredAttention
    mamba: StoredMamba


StoredMixer: TypeAlias = (
    StoredAttention
    | StoredBlocks
    | StoredCompressed
    | StoredConvolution
    | StoredConvolved
    | StoredDeltaNet
    | StoredGatedUnit
    | StoredLatent
    | StoredLightning
    | StoredMamba
    | StoredParallel
    | StoredRelative
    | StoredSelective
)


def stored_mixer(names: LayerNames, spec: MixerSpec) -> StoredMixer | None:
    """Name the tensors of a layer's mixer; None: it has none."""
    if isinstance(spec, NoMixer):
        return None
    if isinstance(spec, DeltaShape):
        return stored_delta_net(names, spec)
    if isinstance(spec, ParallelSpec):
        return StoredParallel(
            stored_attention(names, spec.attention), stored_mamba(names, spec.mamba)
        )
    if isinstance(spec, MambaShape):
        return stored_mamba(names, spec)
    if isinstance(spec, LightningShape):
        return stored_lightning(names, spec)
    if isinstance(spec, SelectiveShape):
        return stored_selective(names, spec)
    if isinstance(spec, GatedUnitShape):
        return stored_gated_unit(names, spec)
    if isinstance(spec, ConvolutionShape):
        return stored_convolution(names, spec)
    if isinstance(spec, LatentSpec):
        return stored_latent(names, spec)
    if isinstance(spec, CompressedSpec):
        return stored_compressed(names, spec)
    if isinstance(spec, ConvolvedFeedForward):
        return stored_convolved(names, spec)
    if spec.relative is not None:
        return stored_relative(names, spec)
    return stored_attention(names, spec) if spec.index is None else stored_blocks(names, spec)


def read_mixer(
    reader: TensorReader,
    stored: StoredMixer | None,
    spec: MixerSpec,
    norm: StoredNorm | None,
) -> MixerWeights | None:
    """Read a layer's mixer; None: it has none.

    spec: its shape in the whole model; norm: the norm whose output it reads.
    """
    if stored is None:
        return None
    if isinstance(stored, StoredDeltaNet):
        assert isinstance(spec, DeltaShape)
        return read_delta_net(reader, stored, spec, norm)
    if isinstance(stored, StoredParallel):
        assert isinstance(spec, ParallelSpec)
        return ParallelWeights(
            read_attention(reader, stored.attention, spec.attention, norm),
            read_mamba(reader, stored.mamba, spec.mamba, norm),
        )
    if isinstance(stored, StoredMamba):
        assert isinstance(spec, MambaShape)
        return read_mamba(reader, stored, spec, norm)
    if isinstance(stored, StoredLightning):
        assert isinstance(spec, LightningShape)
        return read_lightning(reader, stored, spec, norm)
    if isinstance(stored, StoredSelective):
        assert isinstance(spec, SelectiveShape)
        return read_selective(reader, stored, spec, norm)
    if isinstance(stored, StoredGatedUnit):
        assert isinstance(spec, GatedUnitShape)
        return read_gated_unit(reader, stored, spec, norm)
    if isinstance(stored, StoredConvolution):
        assert isinstance(spec, ConvolutionShape)
        return read_convolution(reader, stored, spec, norm)
    if isinstance(stored, StoredLatent):
        assert isinstance(spec, LatentSpec)
        return read_latent_weights(reader, stored, spec, norm)
    if isinstance(stored, StoredCompressed):
        assert isinstance(spec, CompressedSpec)
        return read_compressed(reader, stored, spec, norm)
    if isinstance(stored, StoredConvolved):
        assert isinstance(spec, ConvolvedFeedForward)
        return read_convolved(reader, stored, spec, norm)
    assert isinstance(spec, AttentionSpec)
    if isinstance(stored, StoredRelative):
        return read_relative(reader, stored, spec, norm)
    if isinstance(stored, StoredBlocks):
        return read_blocks(reader, stored, spec, norm)
    return read_attention(reader, stored, spec, norm)
