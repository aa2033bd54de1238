"""Mamba-2 layers of a decoder, read from config.json."""

import math
from collections.abc import Mapping

from services.engine.model.architecture.mamba_shape import MambaShape
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["mamba_layers", "read_mamba_layers", "require_silu"]

_MAMBA = ("linear_attention", "mamba")
_ATTENTION = ("full_attention", "attention")
"""transformers' name of a kind, and the one in published files"""


def read_mamba_layers(
    config: Config, hidden_size: int, num_layers: int
) -> Mapping[int, MambaShape]:
    """Read the layers that are Mamba-2, by number. Raises CheckpointError."""
    layers = mamba_layers(config, num_layers)
    return dict.fromkeys(layers, _shape(config, hidden_size)) if layers else {}


def mamba_layers(config: Config, num_layers: int) -> list[int]:
    """Return the numbers of the layers other than attention. Raises CheckpointError."""
    if config.has("layer_types"):
        kinds = config.kind_per_layer("layer_types", num_layers, (*_MAMBA, *_ATTENTION))
        return [layer for layer, kind in enumerate(kinds) if kind in _MAMBA]
    if config.has("attn_layer_period"):
        period, offset = config.positive("attn_layer_period"), config.integer("attn_layer_offset")
        return [layer for layer in range(num_layers) if layer % period != offset]
    attends = config.ids("attn_layer_indices")
    if not set(attends) <= set(range(num_layers)):
        raise CheckpointError(
            f"{config.file}: attn_layer_indices must name layers from 0 to {num_layers - 1}."
        )
    return [layer for layer in range(num_layers) if layer not in attends]


def _shape(config: Config, hidden_size: int) -> MambaShape:
    heads, groups = config.positive("mamba_n_heads"), config.positive("mamba_n_groups", 1)
    head_dim = _head_dim(config, hidden_size, heads)
    if heads % groups:
        raise CheckpointError(
            f"{config.file}: {config.file_key('mamba_n_groups')} ({groups}) must divide "
            f"{config.file_key('mamba_n_heads')} ({heads})."
        )
    width = config.positive("mamba_d_conv", 4)
    if width == 1:
        raise CheckpointError(
            f"{config.file}: {config.file_key('mamba_d_conv')} must be at least 2, got 1."
        )
    require_silu(config)
    least_step, most_step = _step_limits(config)
    has_bias = config.flag("mamba_proj_bias", False)
    has_norm = config.flag("mamba_rms_norm", True)
    return MambaShape(
        heads=heads,
        head_dim=head_dim,
        groups=groups,
        state_width=config.positive("mamba_d_state"),
        conv_width=width,
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_bias=has_bias,
        has_output_bias=config.flag("projectors_bias", has_bias),
        norm_width=heads // groups * head_dim if has_norm else 0,
        norms_first=config.flag("mamba_norm_before_gate", False),
        norm_epsilon=config.positive_number(
            "mixer_rms_eps" if config.has("mixer_rms_eps") else "rms_norm_eps", 1e-6
        ),
        least_step=least_step,
        most_step=most_step,
    )


def require_silu(config: Config) -> None:
    """Raise CheckpointError if Mamba layers have another activation."""
    activation = config.text("mamba_hidden_act", "silu")
    if activation != "silu":
        raise CheckpointError(
            f"{config.file}: {config.file_key('mamba_hidden_act')} {activation} is not supported "
            "for Mamba layers. Supported: silu."
        )


def _head_dim(config: Config, hidden_size: int, heads: int) -> int:
    """Return the width of a head, stated as such or by the width of all heads."""
    if config.has("mamba_d_ssm"):
        key, width = config.file_key("mamba_d_ssm"), config.positive("mamba_d_ssm")
    elif config.has("mamba_expand"):
        key = f"{config.file_key('mamba_expand')} times hidden_size"
        width = config.positive("mamba_expand") * hidden_size
    else:
        return config.positive("mamba_d_head")
    head_key = config.file_key("mamba_d_head")
    is_stated = config.has("mamba_d_head") and config.values[head_key] != "auto"
    head_dim = config.positive("mamba_d_head") if is_stated else width // heads
    if heads * head_dim != width:
        raise CheckpointError(
            f"{config.file}: {config.file_key('mamba_n_heads')} ({heads}) times {head_key} "
            f"({head_dim}) must be {key} ({width})."
        )
    return head_dim


def _step_limits(config: Config) -> tuple[float, float]:
    """Return the least and the largest time step."""
    if not config.has("time_step_limit"):
        return 0.0, math.inf
    limits = config.numbers("time_step_limit")
    if len(limits) != 2 or not 0 <= limits[0] <= limits[1]:
        raise CheckpointError(
            f"{config.file}: time_step_limit must be two rising numbers from 0 on, got "
            f"{list(limits)}."
        )
    return limits[0], limits[1]
