"""Layers of Griffin (RecurrentGemma), read from config.json: gated units and attention."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import cycle, islice

import numpy as np

from services.common.json_values import Json
from services.engine.model.architecture.gated_unit_shape import GatedUnitShape
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["read_gated_units", "with_griffin_keys"]

_KINDS = {"recurrent": "linear_attention", "attention": "sliding_attention"}
"""Kinds in block_types, and transformers' names of kinds of layers"""
_ACTIVATION = "gelu_pytorch_tanh"


def with_griffin_keys(config: Config) -> Config:
    """Return a config with the keys that other families have. Raises CheckpointError.

    The factor of embeddings is rounded to bfloat16 whatever the dtype, as in transformers.
    """
    hidden_size, heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    kinds = config.texts("block_types")
    if unknown := [kind for kind in kinds if kind not in _KINDS]:
        raise CheckpointError(
            f"{config.file}: block_types has {unknown[0]}, which is not supported. Supported: "
            f"{', '.join(_KINDS)}."
        )
    if not kinds:
        raise CheckpointError(f"{config.file}: block_types names no layer.")
    if (activation := config.text("hidden_activation")) != _ACTIVATION:
        raise CheckpointError(
            f"{config.file}: hidden_activation {activation} is not supported here. Supported: "
            f"{_ACTIVATION}."
        )
    layers = islice(cycle(kinds), config.positive("num_hidden_layers"))
    head_dim = config.positive("head_dim", max(hidden_size // heads, 1))
    values: dict[str, Json] = {
        "attention_multiplier": head_dim**-0.5,
        "embedding_multiplier": _in_bfloat16(hidden_size**0.5),
        "head_dim": head_dim,
        "intermediate_size": config.positive("intermediate_size") // 2,
        "layer_types": [_KINDS[kind] for kind in layers],
    }
    return replace(config, values={**config.values, **values})


def read_gated_units(
    config: Config, hidden_size: int, num_layers: int
) -> Mapping[int, GatedUnitShape]:
    """Read the layers that are gated units, by number. config: result of `with_griffin_keys`."""
    heads, channels = (
        config.positive("num_attention_heads"),
        config.positive("lru_width", hidden_size),
    )
    if channels % heads:
        raise CheckpointError(
            f"{config.file}: lru_width ({channels}) is not a multiple of num_attention_heads "
            f"({heads})."
        )
    if (width := config.positive("conv1d_width")) == 1:
        raise CheckpointError(f"{config.file}: conv1d_width must be at least 2, got 1.")
    shape = GatedUnitShape(heads, channels // heads, width)
    kinds = config.kind_per_layer("layer_types", num_layers, tuple(_KINDS.values()))
    return {layer: shape for layer, kind in enumerate(kinds) if kind == _KINDS["recurrent"]}


def _in_bfloat16(number: float) -> float:
    """Return the nearest number of type bfloat16, the one with an even last bit if two are."""
    bits = int(np.float32(number).view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))
