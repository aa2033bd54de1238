"""Layers that attend over a window, and layers that rotate, by config.json. Free of torch."""

from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family, WindowRule

__all__ = ["local_layers", "rotating_layers"]


def local_layers(config: Config, family: Family, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it attends over a window only."""
    rule = family.windows
    if rule is WindowRule.BEHIND_DENSE:
        config.positive("sliding_window")  # transformers needs it even if no layer has a window
    has_windows = rule is not WindowRule.NONE and config.has("sliding_window")
    if not has_windows or not config.flag("use_sliding_window", True):
        return (False,) * num_layers
    if rule is WindowRule.ALL:
        return (True,) * num_layers
    if rule is WindowRule.LISTED_LOCAL:
        if not config.has("attention_layers"):
            return tuple(layer % 2 == 1 for layer in range(num_layers))
        kinds = config.kind_per_layer("attention_layers", num_layers, ("local", "global"))
        return tuple(kind == "local" for kind in kinds)
    if config.has("layer_types"):
        local = "chunked_attention" if rule is WindowRule.CHUNKED else "sliding_attention"
        known = [local, "full_attention"]
        known += ["conv"] * (family.names.convolution is not None)
        known += ["linear_attention"] * (family.names.delta_net is not None)
        known += ["linear_attention"] * (family.names.gated_unit is not None)
        kinds = config.kind_per_layer("layer_types", num_layers, tuple(known))
        return tuple(kind == local for kind in kinds)
    if rule is WindowRule.CHUNKED:
        return tuple(rotating_layers(config, num_layers))
    if rule is WindowRule.SPACED:
        pattern = config.positive("sliding_window_pattern")
        return tuple(layer % pattern != 0 for layer in range(num_layers))
    if rule is WindowRule.BEHIND_DENSE:
        first = config.integer("moe_layer_start_index", 0)
        near = config.positive("prefix_dense_sliding_window_pattern")
        pattern = config.positive("sliding_window_pattern")
        return tuple(
            (layer + 1) % near != 0 if layer < first else (layer - first + 1) % pattern != 0
            for layer in range(num_layers)
        )
    if rule is WindowRule.PATTERN:
        pattern = config.positive("sliding_window_pattern")
        return tuple((layer + 1) % pattern != 0 for layer in range(num_layers))
    first = config.integer("max_window_layers")
    if rule is WindowRule.EVEN:
        return tuple(layer % 2 == 0 and layer < first for layer in range(num_layers))
    return tuple(layer >= first for layer in range(num_layers))


def rotating_layers(config: Config, num_layers: int) -> list[bool]:
    """Return for each layer whether no_rope_layers gives it RoPE."""
    interval = config.positive("no_rope_layer_interval")
    rotates = config.ids("no_rope_layers") or tuple(
        (layer + 1) % interval for layer in range(num_layers)
    )
    if len(rotates) < num_layers:
        raise CheckpointError(
            f"{config.file}: no_rope_layers names {len(rotates)} layers, "
            f"num_hidden_layers {num_layers}."
        )
    return [bool(rotates[layer]) for layer in range(num_layers)]
