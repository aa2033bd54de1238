"""Lightning attention layers of a decoder, read from config.json."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from services.engine.model.architecture.layers import LayerSpec
from services.engine.model.architecture.lightning_shape import LightningShape
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["read_lightning_layers", "residual_factor", "with_normed_residual"]

_BETAS = ("linear_attn_beta_factor", "full_attn_beta_factor", "mlp_beta_factor")


def read_lightning_layers(
    config: Config, hidden_size: int, num_layers: int
) -> Mapping[int, LightningShape]:
    """Read the layers that are lightning attention, by number. Raises CheckpointError."""
    kinds = _kinds(config, num_layers)
    heads = config.positive("num_attention_heads")
    width = config.positive("head_dim", hidden_size // heads)
    if (name := config.text("hidden_act", "silu")) != "silu":
        raise CheckpointError(
            f"{config.file}: hidden_act {name} is not supported for lightning attention. "
            "Supported: silu."
        )
    return {
        layer: LightningShape(
            heads, width, heads * width, 1 - layer / (num_layers - 1 + 1e-5) + 1e-5
        )
        for layer, kind in enumerate(kinds)
        if kind == "linear_attention"
    }


def with_normed_residual(config: Config, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return layers whose parts add to the norms' outputs times a factor, as the residual.

    Raises CheckpointError for a factor that is not positive.
    """
    last = config.positive_number("mlp_alpha_factor", 1.0)
    factors = [
        config.positive_number(f"{kind}_attn_alpha_factor", 1.0) for kind in ("linear", "full")
    ]
    return tuple(
        replace(
            layer,
            normed_factors=(factors[not isinstance(layer.mixer, LightningShape)], last),
        )
        for layer in layers
    )


def residual_factor(config: Config) -> float:
    """Return the factor on what all parts add to the residual. Raises CheckpointError."""
    betas = [config.positive_number(key, 1.0) for key in _BETAS]
    if len({*betas}) > 1:
        raise CheckpointError(f"{config.file}: {', '.join(_BETAS)} must be equal, got {betas}.")
    return betas[0]


def _kinds(config: Config, num_layers: int) -> Sequence[str]:
    known = ("full_attention", "linear_attention")
    if config.has("attn_type_list"):
        attends = config.ids("attn_type_list")
        if len(attends) != num_layers:
            raise CheckpointError(
                f"{config.file}: attn_type_list names {len(attends)} layers, num_hidden_layers "
                f"{num_layers}."
            )
        return [known[not each] for each in attends]
    if config.has("layer_types"):
        return config.kind_per_layer("layer_types", num_layers, known)
    return [known[layer % 2] for layer in range(num_layers)]
