"""Layers of MiMo V2 Flash, read from config.json as its authors or transformers write it."""

from dataclasses import replace

from services.common.json_values import Json
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["with_mimo_keys"]

_PERIOD = 6
"""The first layer and every sixth one see all tokens, unless the file lists the layers"""
_EQUAL = {
    "swa_head_dim": "head_dim",
    "swa_num_attention_heads": "num_attention_heads",
    "swa_v_head_dim": "v_head_dim",
}
"""Keys of layers with a window that must have the value of another key"""
_BASE, _LOCAL_BASE = 5_000_000.0, 10_000.0


def with_mimo_keys(config: Config) -> Config:
    """Return a config with the keys that other families have. Raises CheckpointError."""
    for key, other in _EQUAL.items():
        if config.has(key) and config.positive(key) != config.positive(other):
            raise CheckpointError(
                f"{config.file}: {key} ({config.positive(key)}) must equal {other} "
                f"({config.positive(other)})."
            )
    values: dict[str, Json] = {
        "layer_types": _kinds(
            config, "hybrid_layer_pattern", "layer_types", ("full_attention", "sliding_attention")
        ),
        "mlp_layer_types": _kinds(config, "moe_layer_freq", "mlp_layer_types", ("dense", "sparse")),
        "swa_num_key_value_heads": config.positive(
            "swa_num_key_value_heads", 2 * config.positive("num_key_value_heads")
        ),
    }
    if config.has("sliding_window_size"):  # tokens beside the query's own
        values["sliding_window"] = config.positive("sliding_window_size") + 1
    if config.has("layernorm_epsilon"):
        values["rms_norm_eps"] = config.positive_number("layernorm_epsilon")
    if not config.has("rope_parameters"):
        base = config.positive_number("rope_theta", _BASE)
        local = config.positive_number("swa_rope_theta", _LOCAL_BASE)
        values["rope_parameters"] = {
            "full_attention": {**config.section("rope_scaling").values, "rope_theta": base},
            "sliding_attention": {"rope_theta": local},
        }
    return replace(config, values={**config.values, **values})


def _kinds(config: Config, marks_key: str, key: str, kinds: tuple[str, str]) -> list[Json]:
    """Return the kind of each layer, from `key`, or the second of `kinds` where a mark is 1."""
    layers = config.positive("num_hidden_layers")
    if config.has(key):
        return [*config.kind_per_layer(key, layers, kinds)]
    if config.has(marks_key):
        marks = config.integers(marks_key)
        if len(marks) != layers or set(marks) - {0, 1}:
            raise CheckpointError(
                f"{config.file}: {marks_key} must have a 0 or a 1 for each of the {layers} layers "
                "that num_hidden_layers states."
            )
        return [kinds[mark] for mark in marks]
    if key == "mlp_layer_types":
        return [kinds[layer > 0] for layer in range(layers)]
    return [kinds[layer > 0 and (layer + 1) % _PERIOD > 0] for layer in range(layers)]
