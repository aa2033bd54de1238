"""Kinds of layers that a GGUF file describes, as keys of config.json."""

from services.common.gguf.gguf_file import GgufFile
from services.common.json_values import Json

__all__ = ["delta_net", "windows"]


def windows(file: GgufFile, pattern: int) -> dict[str, Json]:
    """Return the layers with a window: all but every `pattern`-th, unless the file lists them."""
    name = file.architecture
    key = f"{name}.attention.sliding_window_pattern"
    if not isinstance(file.metadata.get(key), list):
        return {"sliding_window_pattern": file.integer(key, pattern)}
    layers = file.integer(f"{name}.block_count")
    return {
        "layer_types": [
            "sliding_attention" if each else "full_attention"
            for each in file.integers(key, layers)[:layers]
        ]
    }


def delta_net(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Qwen's hybrids, whose layers are gated delta nets or attention."""
    name = file.architecture
    layers = file.integer(f"{name}.block_count")
    layers -= file.integer(f"{name}.nextn_predict_layers", 0)
    interval = max(file.integer(f"{name}.full_attention_interval", 4), 1)
    recurrent = file.numbers(f"{name}.attention.recurrent_layers") or [
        (layer + 1) % interval for layer in range(layers)
    ]
    value_heads = file.integer(f"{name}.ssm.time_step_rank")
    return {
        "layer_types": [
            "linear_attention" if each else "full_attention" for each in recurrent[:layers]
        ],
        "linear_conv_kernel_dim": file.integer(f"{name}.ssm.conv_kernel"),
        "linear_key_head_dim": file.integer(f"{name}.ssm.state_size"),
        "linear_num_key_heads": file.integer(f"{name}.ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": file.integer(f"{name}.ssm.inner_size") // max(value_heads, 1),
    }
