"""Size of the cached keys and values of a text, by config.json alone. Free of torch.

The engine reckons with each layer's exact shape, for which it imports torch. This module knows the
common shapes, and says where it does not know.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.common.json_values import Json
from services.engine.model.checkpoint.architectures import family_of
from services.engine.model.checkpoint.config import CheckpointError, Config
from services.engine.model.checkpoint.family import Family, WindowRule
from services.engine.model.checkpoint.local_layers import local_layers

__all__ = ["CachedKeys", "cached_keys"]

_KINDS = {"full_attention", "sliding_attention"}
_OTHER_LAYERS = (
    *("attention_layers", "multi_query", "v_head_dim"),
    *("attn_layer_indices", "attn_layer_period", "attn_type_list", "block_types", "cla_share"),
    *("compress_ratios", "compress_ratio", "conv_L_cache", "full_attn_idxs", "global_attn_every_n"),
    *("hybrid_layer_ids", "hybrid_layer_pattern", "hybrid_override_pattern", "index_head_dim"),
    *("kv_lora_rank", "layers_block_type", "layer_group_size", "linear_attn_config"),
    *("linear_conv_kernel_dim", "mamba_d_state", "no_rope_layers", "num_kv_shared_layers"),
    *("sconv_kernel", "ssm_cfg", "state_size", "time_step_rank", "use_cla"),
)
"""Keys of models in which a layer keeps something else than the keys and values of its heads"""


@dataclass(frozen=True, slots=True)
class CachedKeys:
    """Numbers that all layers together keep of a token."""

    everywhere: int
    """Numbers of layers that see all tokens"""
    within_window: int
    """Numbers of layers that see the last `window` tokens alone"""
    window: int

    def numbers(self, tokens: int) -> int:
        """Return the numbers that a text of so many tokens keeps."""
        near = min(tokens, self.window) if self.window else 0
        return self.everywhere * tokens + self.within_window * near


def cached_keys(config: Config) -> CachedKeys | None:
    """Return the numbers of a decoder that keeps keys and values of heads; None for other models.

    Raises CheckpointError for an architecture that is not served.
    """
    family = family_of(config)
    if family.sees_whole_texts or family.parts:
        return None
    nested = {} if family.section is None else config.section(family.section).values
    values = {**family.defaults, **nested, **config.values}
    try:
        return _of_heads(Config(config.file, values, family.keys), family)
    except CheckpointError:  # a key has another name, or a value for each layer
        return None


def _of_heads(config: Config, family: Family) -> CachedKeys | None:
    values: Mapping[str, Json] = config.values
    if any(values.get(key) is not None for key in _OTHER_LAYERS):
        return None
    if family.windows is WindowRule.CHUNKED:
        return None
    layers, heads = config.positive("num_hidden_layers"), config.positive("num_attention_heads")
    head_dim = config.positive("head_dim", config.positive("hidden_size") // heads)
    width = 2 * config.positive("num_key_value_heads", heads) * head_dim
    if config.has("layer_types") and not set(config.texts("layer_types")) <= _KINDS:
        return None
    near = sum(local_layers(config, family, layers))
    window = config.positive("sliding_window") if near else 0
    return CachedKeys((layers - near) * width, near * width, window)
