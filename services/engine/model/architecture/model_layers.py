"""Layers of a model by the kinds of their mixers, read from config.json. Free of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.common.gguf.gguf_config import MARK
from services.common.json_values import Json
from services.engine.model.architecture.compressed_spec import CompressedSpec
from services.engine.model.architecture.griffin_layers import with_griffin_keys
from services.engine.model.architecture.latent_spec import LatentSpec
from services.engine.model.architecture.layer_reader import read_layers
from services.engine.model.architecture.layers import AttentionSpec, LayerSpec, ParallelSpec
from services.engine.model.architecture.mimo_layers import with_mimo_keys
from services.engine.model.architecture.mosaic_keys import with_mosaic_keys
from services.engine.model.architecture.relative_reader import with_inkling_keys
from services.engine.model.architecture.single_parts import with_parts
from services.engine.model.architecture.zamba_layers import with_zamba_keys
from services.engine.model.checkpoint.architectures import family_of
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family
from services.engine.model.checkpoint.gguf_families import gguf_family

__all__ = ["ModelLayers", "read_config", "read_model_layers"]

_MOST = {
    "num_hidden_layers": 4096,
    "num_experts": 65_536,
    "num_local_experts": 65_536,
    "zero_expert_num": 65_536,
    "hidden_size": 1 << 24,
    "head_dim": 65_536,
    "qk_rope_head_dim": 65_536,
}
"""Largest counts and widths that are read, far above those of published models"""


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """Layers of a model, and the family to which it belongs."""

    family: Family
    """Names and storage conventions of the tensors"""
    hidden_size: int
    """Width of the residual"""
    layers: tuple[LayerSpec, ...]

    @property
    def is_encoder(self) -> bool:
        """True if every token sees all tokens of its text."""
        return self.family.sees_whole_texts

    @property
    def attention_layers(self) -> Mapping[int, AttentionSpec]:
        """The attention of the layers that have it, alone or beside another mixer, by number."""
        mixers = enumerate(map(_attention, self.layers))
        return {index: mixer for index, mixer in mixers if mixer is not None}

    @property
    def latent_layers(self) -> Mapping[int, LatentSpec]:
        """The layers that are latent attention, by number."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, LatentSpec)}

    @property
    def compressed_layers(self) -> Mapping[int, CompressedSpec]:
        """The layers that attend to compressed entries or to a window of such layers, by number."""
        mixers = enumerate(layer.mixer for layer in self.layers)
        return {index: mixer for index, mixer in mixers if isinstance(mixer, CompressedSpec)}

    @property
    def paged_layers(self) -> Mapping[int, AttentionSpec]:
        """The layers that have pages of keys and values, by number."""
        layers = self.attention_layers.items()
        return {
            index: layer
            for index, layer in layers
            if layer.reads_layer is None and layer.index is None and layer.relative is None
        }

    @property
    def indexed_layers(self) -> Mapping[int, AttentionSpec]:
        """The layers whose pages hold keys, values and index keys together, by number."""
        layers = self.attention_layers.items()
        return {index: layer for index, layer in layers if layer.index is not None}

    @property
    def relative_layers(self) -> Mapping[int, AttentionSpec]:
        """The layers whose scores have addends by distance, and whose pages hold keys and values
        together, by number."""
        layers = self.attention_layers.items()
        return {index: layer for index, layer in layers if layer.relative is not None}

    @property
    def joint_layers(self) -> Mapping[int, LatentSpec | AttentionSpec]:
        """The layers whose pages hold all of a token in one row, by number."""
        return {**self.latent_layers, **self.indexed_layers, **self.relative_layers}

    def attention(self, layer: int) -> AttentionSpec:
        """Return the attention of a layer, which must have it."""
        mixer = _attention(self.layers[layer])
        assert mixer is not None
        return mixer


def read_model_layers(values: Mapping[str, Json], file: str = "config.json") -> ModelLayers:
    """Read the layers from the parsed config.json `values`. Raises CheckpointError.

    Weights are taken as not quantized, which mixers do not depend on.
    """
    family, config = read_config(values, file)
    hidden_size = config.positive("hidden_size")
    context_length = config.positive("max_position_embeddings")
    layers = read_layers(config, family, hidden_size, context_length, has_mxfp4=False)
    return ModelLayers(family, hidden_size, layers)


def read_config(values: Mapping[str, Json], file: str) -> tuple[Family, Config]:
    """Return the family of a config.json, and its values under the names that readers know.

    Raises CheckpointError for an unknown architecture, and for a missing or mistyped value.
    """
    whole = Config(file, dict(values))
    family = family_of(whole)
    if whole.has(MARK):
        family = gguf_family(family, whole.section(MARK))
    nested = {} if family.section is None else whole.section(family.section).values
    for part in family.parts:
        nested = nested | whole.section(part).values
    config = Config(file, {**family.defaults, **nested, **values}, family.keys)
    _check_counts(config)
    family = _with_parallel_norms(family, config)
    if family.reads_norm_kind and config.values.get("rms_norm_eps") is not None:
        family, config = replace(family, layer_norm=False), config.without("rms_norm_eps")
    if family.parts:
        config = with_mosaic_keys(config)
    if family.has_single_parts:
        config = with_parts(config)
    if family.names.shared_block is not None:
        config = with_zamba_keys(config)
    if family.names.gated_unit is not None:
        config = with_griffin_keys(config)
    if family.has_mimo_keys:
        config = with_mimo_keys(config)
    if family.names.relative is not None:
        config = with_inkling_keys(config)
    return family, config


def _check_counts(config: Config) -> None:
    """Raise CheckpointError for values that would fill the memory before a tensor is missed."""
    for key, most in _MOST.items():
        count = config.values.get(config.file_key(key))
        if isinstance(count, int) and count > most:
            raise CheckpointError(f"{config.file}: {config.file_key(key)} must be at most {most}.")


def _with_parallel_norms(family: Family, config: Config) -> Family:
    """Return the family with the names of Falcon's two norms, if a layer has them."""
    norms = family.parallel_norms
    if norms is None or not config.flag("new_decoder_architecture", False):
        return family
    if config.integer("num_ln_in_parallel_attn", len(norms)) != len(norms):
        return family
    return replace(family, names=family.names.with_norms(*norms), shares_norm=False)


def _attention(layer: LayerSpec) -> AttentionSpec | None:
    mixer = layer.mixer.attention if isinstance(layer.mixer, ParallelSpec) else layer.mixer
    return mixer if isinstance(mixer, AttentionSpec) else None
