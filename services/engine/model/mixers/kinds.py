"""Kinds of mixers: the weights of each, and the mixer that is made of them."""

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import torch

from services.engine.model.architecture.cache_groups import layer_groups
from services.engine.model.architecture.compressed_spec import CompressedSpec
from services.engine.model.architecture.convolution_shape import ConvolutionShape
from services.engine.model.architecture.delta_shape import DeltaShape
from services.engine.model.architecture.gated_unit_shape import GatedUnitShape
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.architecture.layers import (
    AttentionSpec,
    ConvolvedFeedForward,
    MixerSpec,
    ParallelSpec,
)
from services.engine.model.architecture.lightning_shape import LightningShape
from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import AttentionBackend
from services.engine.model.mixers.attention import AttentionMixer, AttentionWeights
from services.engine.model.mixers.block_mixer import BlockMixer, BlockWeights
from services.engine.model.mixers.compressed_mixer import CompressedMixer, CompressedWeights
from services.engine.model.mixers.convolution import ConvolutionMixer, ConvolutionWeights
from services.engine.model.mixers.convolved import ConvolvedMixer, ConvolvedWeights
from services.engine.model.mixers.delta_net import DeltaNetMixer, DeltaNetWeights
from services.engine.model.mixers.delta_rule_choice import choose_delta_rule
from services.engine.model.mixers.empty import EmptyMixer
from services.engine.model.mixers.gated_unit import GatedUnitMixer, GatedUnitWeights
from services.engine.model.mixers.interface import Mixer
from services.engine.model.mixers.latent_mixer import LatentMixer, LatentShared, LatentWeights
from services.engine.model.mixers.lightning import LightningMixer, LightningWeights
from services.engine.model.mixers.mamba import MambaMixer, MambaWeights
from services.engine.model.mixers.mamba_scan_choice import choose_mamba_scan
from services.engine.model.mixers.parallel import ParallelMixer
from services.engine.model.mixers.relative_mixer import RelativeMixer, RelativeWeights
from services.engine.model.mixers.runs import RunGroups
from services.engine.model.mixers.selective import SelectiveMixer, SelectiveWeights
from services.engine.model.mixers.selective_heads import SelectiveHeads
from services.engine.model.mixers.selective_scan_choice import choose_selective_scan
from services.engine.model.operators.interface import Operators
from services.engine.model.operators.rotation import Rotaries, Rotary

__all__ = ["MixerMaker", "MixerWeights", "ParallelWeights"]


@dataclass(frozen=True, slots=True)
class ParallelWeights:
    """Weights of attention and of Mamba-2 beside it."""

    attention: AttentionWeights
    mamba: MambaWeights


MixerWeights: TypeAlias = (
    AttentionWeights
    | BlockWeights
    | CompressedWeights
    | ConvolutionWeights
    | ConvolvedWeights
    | DeltaNetWeights
    | GatedUnitWeights
    | LatentWeights
    | LightningWeights
    | MambaWeights
    | ParallelWeights
    | RelativeWeights
    | tuple[SelectiveWeights, ...]
)


class MixerMaker:
    """Maker of a decoder's mixers."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        operators: Operators,
        backend: AttentionBackend,
    ) -> None:
        rotated = [
            *((each.rotary, each.head_dim) for each in spec.attention_layers.values()),
            *((each.rotary, each.shared_width) for each in spec.latent_layers.values()),
            *((each.rotary, each.rotary_width) for each in spec.compressed_layers.values()),
            *(
                (each.rotary, each.index.width)
                for each in spec.indexed_layers.values()
                if each.index is not None
            ),
        ]
        self.rotaries = Rotaries(
            ((rotary, width) for rotary, width in rotated if rotary is not None), device
        )
        self._epsilon = spec.norm_epsilon
        self._operators = operators
        self._backend = backend
        self._groups = {
            layer: number
            for number, group in enumerate(layer_groups(spec))
            for layer in group.layers
        }
        self._latents = LatentShared()
        self._runs = RunGroups()
        self._dtype = dtype
        self._device = device
        self._scan = cache(lambda shape: choose_mamba_scan(shape, dtype, device, self._runs))
        self._selective = cache(
            lambda shape: choose_selective_scan(shape, dtype, device, self._runs)
        )
        self._rule = cache(lambda shape: choose_delta_rule(shape, dtype, device))

    def make(self, layer: int, spec: MixerSpec, weights: MixerWeights | None) -> Mixer[Any]:
        """Make the mixer of layer `layer`."""
        if weights is None:
            return EmptyMixer()
        if isinstance(weights, DeltaNetWeights):
            assert isinstance(spec, DeltaShape)
            return DeltaNetMixer(layer, spec, weights, self._operators, self._rule(spec))
        if isinstance(weights, ConvolutionWeights):
            assert isinstance(spec, ConvolutionShape)
            operators, runs = self._operators, self._runs
            return ConvolutionMixer(layer, spec, weights, operators, runs, self._dtype)
        if isinstance(weights, ConvolvedWeights):
            assert isinstance(spec, ConvolvedFeedForward)
            operators, runs = self._operators, self._runs
            return ConvolvedMixer(layer, spec, weights, operators, runs, self._dtype)
        if isinstance(weights, GatedUnitWeights):
            assert isinstance(spec, GatedUnitShape)
            operators, runs = self._operators, self._runs
            return GatedUnitMixer(layer, spec, weights, operators, runs, self._dtype)
        if isinstance(weights, ParallelWeights):
            assert isinstance(spec, ParallelSpec)
            attention = self.make(layer, spec.attention, weights.attention)
            return ParallelMixer(attention, self.make(layer, spec.mamba, weights.mamba))
        if isinstance(weights, MambaWeights):
            assert isinstance(spec, MambaShape)
            return MambaMixer(layer, spec, weights, self._operators, self._scan(spec))
        if isinstance(weights, tuple):
            assert isinstance(spec, SelectiveShape)
            scan, operators = self._selective(spec.head), self._operators
            heads = [SelectiveMixer(layer, spec.head, head, operators, scan) for head in weights]
            return heads[0] if len(heads) == 1 else SelectiveHeads(layer, heads)
        if isinstance(weights, LightningWeights):
            assert isinstance(spec, LightningShape)
            return LightningMixer(layer, spec, weights, self._operators, self._runs)
        if isinstance(weights, CompressedWeights):
            assert isinstance(spec, CompressedSpec)
            place = self.rotaries.index(spec.rotary, spec.rotary_width)
            rotary = Rotary(spec.rotary, spec.rotary_width, self._device)
            group = self._groups[layer]
            return CompressedMixer(layer, spec, weights, place, rotary, self._operators, group)
        if isinstance(weights, LatentWeights):
            assert isinstance(spec, LatentSpec)
            rotation = None
            if spec.rotary is not None:
                rotation = self.rotaries.index(spec.rotary, spec.shared_width)
            group = self._groups[layer]
            operators, latents = self._operators, self._latents
            return LatentMixer(layer, spec, weights, rotation, operators, latents, group)
        assert isinstance(spec, AttentionSpec)
        if isinstance(weights, BlockWeights):
            assert spec.index is not None
            assert spec.rotary is not None
            attention = self._attention(layer, spec, weights.attention)
            rotation = self.rotaries.index(spec.rotary, spec.index.width)
            group, buffer = self._groups[layer], self._latents.latents
            operators, epsilon = self._operators, self._epsilon
            return BlockMixer(
                layer, spec, weights, attention, rotation, operators, buffer, group, epsilon
            )
        if isinstance(weights, RelativeWeights):
            return RelativeMixer(
                layer,
                spec,
                weights,
                self._attention(layer, spec, weights.attention),
                self._operators,
                self._latents.latents,
                self._runs,
                self._groups[layer],
                self._epsilon,
                self._dtype,
            )
        return self._attention(layer, spec, weights)

    def _attention(
        self, layer: int, spec: AttentionSpec, weights: AttentionWeights
    ) -> AttentionMixer:
        rotation, group = None, spec.foreign_group
        if spec.rotary is not None:
            rotation = self.rotaries.index(spec.rotary, spec.head_dim)
        if group is None:
            group = self._groups[layer if spec.reads_layer is None else spec.reads_layer]
        return AttentionMixer(
            layer,
            spec,
            weights,
            self._epsilon,
            rotation,
            self._operators,
            self._backend,
            group,
        )
