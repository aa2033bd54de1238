"""Recurrent layers of a GGUF file, as keys of config.json."""

from services.common.gguf.gguf_file import GgufFile
from services.common.gguf.gguf_layers import count_layers, read_recurrent_layers
from services.common.json_values import Json

__all__ = [
    "read_attention_layers",
    "read_convolutions",
    "read_falcon_h1",
    "read_jamba",
    "read_lightning",
    "read_mamba",
    "read_nemotron_h",
    "read_selective",
]

_NEMOTRON_KEYS = {
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_proj_bias": "use_bias",
}
"""Names of Nemotron-H for the keys of Mamba-2"""


def read_convolutions(file: GgufFile) -> dict[str, Json]:
    """Return the keys of LFM2, whose layers are short convolutions or attention."""
    return {
        **read_attention_layers(file, "conv"),
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": file.count(file.own("shortconv.l_cache")),
        "num_dense_layers": file.integer(file.own("leading_dense_block_count"), 0),
    }


def read_nemotron_h(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Nemotron-H, whose layers are Mamba-2, attention, or a feed-forward layer.

    Only attention has heads, and only feed-forward layers have a width.
    """
    own, layers = file.own, count_layers(file)
    heads = file.integers(own("attention.head_count_kv"), layers)
    widths = file.integers(own("feed_forward_length"), layers)
    kinds: list[Json] = []
    for layer in range(layers):
        feed_forward = "moe" if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors else "mlp"
        others = "full_attention" if heads[layer] else "linear_attention"
        kinds.append(feed_forward if widths[layer] else others)
    groups = file.count(own("expert_group_count"), 1)
    return {
        **{
            _NEMOTRON_KEYS[key]: value
            for key, value in read_mamba(file).items()
            if value is not None
        },
        "intermediate_size": max(widths) or 1,
        "layers_block_type": kinds,
        "mlp_bias": any(name.endswith("ffn_up.bias") for name in file.tensors),
        "n_group": groups,
        "norm_topk_prob": file.flag(own("expert_weights_norm"), False),
        "num_key_value_heads": max(heads) or 1,
        "num_nextn_predict_layers": 0,
        "routed_scaling_factor": file.number(own("expert_weights_scale"), 1.0),
        "topk_group": file.count(own("expert_group_used_count"), 1, most=groups),
    }


def read_jamba(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Jamba, whose layers are Mamba or attention, some with experts."""
    return {
        **read_attention_layers(file, "linear_attention"),
        **read_selective(file),
        "mlp_layer_types": [
            "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in file.tensors else "dense"
            for layer in range(count_layers(file))
        ],
    }


def read_lightning(file: GgufFile) -> dict[str, Json]:
    """Return the keys of MiniMax-01, whose layers are lightning attention or attention.

    The converter accepts only models whose parts all have the same factor on the residual.
    """
    factor = file.positive(file.own("residual_scale"))
    return {
        **read_recurrent_layers(file, 8),
        **{f"{part}_alpha_factor": factor for part in ("linear_attn", "full_attn", "mlp")},
    }


def read_selective(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Mamba layers."""
    own, biases = file.own, {name.split(".", 2)[-1] for name in file.tensors if "bias" in name}
    return {
        "mamba_conv_bias": "ssm_conv1d.bias" in biases,
        "mamba_d_conv": file.count(own("ssm.conv_kernel")),
        "mamba_d_ssm": file.count(own("ssm.inner_size")),
        "mamba_d_state": file.count(own("ssm.state_size")),
        "mamba_dt_rank": file.count(own("ssm.time_step_rank")),
        "mamba_proj_bias": "ssm_in.bias" in biases,
    }


def read_falcon_h1(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Falcon-H1. The converter has multiplied the weights by their factors."""
    return {
        **read_mamba(file),
        "mamba_d_ssm": file.count(file.own("ssm.inner_size")),
        "mamba_norm_before_gate": False,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in file.tensors,
        "projectors_bias": "blk.0.ssm_out.bias" in file.tensors,
    }


def read_mamba(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Mamba-2 layers."""
    own, biases = file.own, {name.split(".", 2)[-1] for name in file.tensors if "bias" in name}
    heads = file.count(own("ssm.time_step_rank"))
    return {
        "mamba_conv_bias": "ssm_conv1d.bias" in biases,
        "mamba_d_conv": file.count(own("ssm.conv_kernel")),
        "mamba_d_head": file.count(own("ssm.inner_size")) // heads,
        "mamba_d_state": file.count(own("ssm.state_size")),
        "mamba_expand": None,
        "mamba_n_groups": file.count(own("ssm.group_count"), 1),
        "mamba_n_heads": heads,
        "mamba_proj_bias": "ssm_in.bias" in biases,
    }


def read_attention_layers(file: GgufFile, other: str) -> dict[str, Json]:
    """Return which layers are attention: those with heads. other: kind of the others."""
    heads = file.integers(file.own("attention.head_count_kv"), count_layers(file))
    return {
        "layer_types": [
            "full_attention" if each else other for each in heads[: count_layers(file)]
        ],
        "num_key_value_heads": max(heads) or 1,
    }
