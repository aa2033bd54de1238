"""Conversion of the keys of MosaicML's models, DBRX and MPT, to those of other families."""

from dataclasses import replace

from services.common.json_values import Json
from services.engine.model.checkpoint.config import CheckpointError, Config

__all__ = ["with_mosaic_keys"]

_ATTENTION = ("multihead_attention", "grouped_query_attention")
"""Supported values of attn_type"""


def with_mosaic_keys(config: Config) -> Config:
    """Return a config with the keys that other families have.

    config: has the keys of attn_config and ffn_config beside its own. Raises CheckpointError for a
    value that is not served.
    """
    values: dict[str, Json] = {}
    if config.has("ffn_act_fn"):
        values["hidden_act"] = config.section("ffn_act_fn").text("name", "silu")
    if config.has("moe_normalize_expert_weights"):
        if (power := config.number("moe_normalize_expert_weights")) != 1:
            raise CheckpointError(
                f"{config.file}: moe_normalize_expert_weights must be 1 or null, got {power:g}."
            )
        values["norm_topk_prob"] = True
    values |= _of_mpt(config)
    return replace(config, values={**config.values, **values})


def _of_mpt(config: Config) -> dict[str, Json]:
    """Return further keys as MPT's own code reads them (https://github.com/mosaicml/llm-foundry).

    transformers ignores them.
    """
    hidden_size = config.positive("hidden_size")
    values: dict[str, Json] = {"logit_scale": 1.0}
    if (attention := config.text("attn_type", _ATTENTION[0])) not in _ATTENTION:
        raise CheckpointError(
            f"{config.file}: attn_type {attention} is not supported. Supported: "
            f"{', '.join(_ATTENTION)}."
        )
    if "rms" in (norm := config.text("norm_type", "layernorm")):
        raise CheckpointError(f"{config.file}: norm_type {norm} is not supported.")
    if (window := config.integer("sliding_window_size", -1)) > 0:
        raise CheckpointError(f"{config.file}: sliding_window_size {window} is not supported.")
    if config.has("expansion_ratio"):
        values["intermediate_size"] = config.positive("expansion_ratio") * hidden_size
    if config.values.get("logit_scale") == "inv_sqrt_d_model":
        values["logit_scale"] = hidden_size**-0.5
    elif config.has("logit_scale"):
        values["logit_scale"] = config.positive_number("logit_scale")
    return values
