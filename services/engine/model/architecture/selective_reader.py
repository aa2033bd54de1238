"""Mamba layers of a decoder, read from config.json."""

from collections.abc import Mapping

from services.engine.model.architecture.mamba_reader import mamba_layers, require_silu
from services.engine.model.architecture.selective_shape import SelectiveShape
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.recurrent_names import SelectiveNames

__all__ = ["read_selective_layers"]


def read_selective_layers(
    config: Config, names: SelectiveNames, hidden_size: int, num_layers: int
) -> Mapping[int, SelectiveShape]:
    """Read the layers that are Mamba, by number. Raises CheckpointError."""
    return dict.fromkeys(mamba_layers(config, num_layers), _shape(config, names, hidden_size))


def _shape(config: Config, names: SelectiveNames, hidden_size: int) -> SelectiveShape:
    width = config.positive("mamba_d_conv", 4)
    if width == 1:
        raise CheckpointError(
            f"{config.file}: {config.file_key('mamba_d_conv')} must be at least 2, got 1."
        )
    require_silu(config)
    rank = -(-hidden_size // 16)
    if (
        config.has("mamba_dt_rank")
        and config.values.get(config.file_key("mamba_dt_rank")) != "auto"
    ):
        rank = config.positive("mamba_dt_rank")
    epsilon = config.positive_number("rms_norm_eps", 1e-6)
    channels = config.positive("mamba_d_ssm", config.positive("mamba_expand", 2) * hidden_size)
    heads = config.positive("mamba_n_heads", 1) if names.by_head else 1
    if channels % heads:
        raise CheckpointError(
            f"{config.file}: {config.file_key('mamba_n_heads')} ({heads}) must divide the "
            f"{channels} channels of a Mamba layer."
        )
    return SelectiveShape(
        channels=channels,
        state_width=config.positive("mamba_d_state", 16),
        step_rank=rank,
        conv_width=width,
        has_conv_bias=config.flag("mamba_conv_bias", True),
        has_bias=config.flag("mamba_proj_bias", False),
        has_norms=names.norms is not None or config.has("mixer_rms_eps"),
        norm_epsilon=config.positive_number("mixer_rms_eps", epsilon),
        heads=heads,
    )
