"""Recurrent layers of a decoder, read from config.json."""

from collections.abc import Mapping

from services.engine.model.architecture.convolution_shape import ConvolutionShape
from services.engine.model.architecture.delta_reader import read_delta_layers
from services.engine.model.architecture.griffin_layers import read_gated_units
from services.engine.model.architecture.layers import MixerSpec
from services.engine.model.architecture.lightning_reader import read_lightning_layers
from services.engine.model.architecture.mamba_reader import read_mamba_layers
from services.engine.model.architecture.selective_reader import read_selective_layers
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family, WindowRule

__all__ = ["read_recurrent_layers"]


def read_recurrent_layers(
    config: Config, family: Family, hidden_size: int, num_layers: int
) -> Mapping[int, MixerSpec]:
    """Read the layers whose mixers have states, by number. Raises CheckpointError."""
    if family.names.delta_net is not None:
        return read_delta_layers(config, family, num_layers)
    if family.names.mamba is not None:
        return read_mamba_layers(config, hidden_size, num_layers)
    if family.names.lightning is not None:
        return read_lightning_layers(config, hidden_size, num_layers)
    if family.names.selective is not None:
        return read_selective_layers(config, family.names.selective, hidden_size, num_layers)
    if family.names.gated_unit is not None:
        return read_gated_units(config, hidden_size, num_layers)
    if family.names.convolution is not None:
        return _read_convolutions(config, family, hidden_size, num_layers)
    return {}


def _read_convolutions(
    config: Config, family: Family, hidden_size: int, num_layers: int
) -> Mapping[int, ConvolutionShape]:
    if (width := config.positive("conv_L_cache")) == 1:
        raise CheckpointError(f"{config.file}: conv_L_cache must be at least 2, got 1.")
    shape = ConvolutionShape(hidden_size, width, config.flag("conv_bias", False))
    has_windows = family.windows is not WindowRule.NONE
    if config.has("layer_types") or has_windows:
        known = ("conv", "full_attention", *("sliding_attention",) * has_windows)
        kinds = config.kind_per_layer("layer_types", num_layers, known)
        return {layer: shape for layer, kind in enumerate(kinds) if kind == "conv"}
    attends = set(
        config.ids("full_attn_idxs") if config.has("full_attn_idxs") else range(num_layers)
    )
    if not attends <= set(range(num_layers)):
        raise CheckpointError(
            f"{config.file}: full_attn_idxs must name layers from 0 to {num_layers - 1}."
        )
    return {layer: shape for layer in range(num_layers) if layer not in attends}
