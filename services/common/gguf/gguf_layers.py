"""Layers that a GGUF file describes: their number, and their kinds as keys of config.json."""

from services.common.gguf.gguf_file import GgufFile
from services.common.json_values import Json

__all__ = [
    "count_layers",
    "read_delta_net",
    "read_later_windows",
    "read_recurrent_layers",
    "read_windows",
]


def count_layers(file: GgufFile) -> int:
    """Return the number of layers without those that draft tokens.

    Raises GgufError if it is not positive, or more than the tensors of the file.
    """
    layers = file.count(file.own("block_count"), most=len(file.tensors))
    return layers - file.count(file.own("nextn_predict_layers"), 0, least=0, most=layers - 1)


def read_windows(file: GgufFile, pattern: int) -> dict[str, Json]:
    """Return the layers with a window: all but every `pattern`-th, unless the file lists them."""
    key = file.own("attention.sliding_window_pattern")
    if not isinstance(file.metadata.get(key), list):
        return {"sliding_window_pattern": file.count(key, pattern)}
    layers = count_layers(file)
    return {
        "layer_types": [
            "sliding_attention" if each else "full_attention"
            for each in file.integers(key, layers)[:layers]
        ]
    }


def read_later_windows(file: GgufFile, pattern: int) -> dict[str, Json]:
    """Return the layers with a window: those in the file's list, or else all but each first of
    `pattern` layers.

    A file that states no window has no such layers.
    """
    if file.integer(file.own("attention.sliding_window"), 0) <= 0:
        return {}
    found = read_windows(file, pattern)
    if "layer_types" in found:
        return found
    pattern = file.count(file.own("attention.sliding_window_pattern"), pattern)
    return {
        "layer_types": [
            "sliding_attention" if layer % pattern else "full_attention"
            for layer in range(count_layers(file))
        ]
    }


def read_recurrent_layers(file: GgufFile, interval: int) -> dict[str, Json]:
    """Return which layers are recurrent. All other layers are attention.

    interval: period of the attention layers, if the file does not list them.
    """
    own, layers = file.own, count_layers(file)
    interval = file.count(own("full_attention_interval"), interval)
    recurrent = file.numbers(own("attention.recurrent_layers")) or [
        (layer + 1) % interval for layer in range(layers)
    ]
    return {
        "layer_types": [
            "linear_attention" if each else "full_attention" for each in recurrent[:layers]
        ]
    }


def read_delta_net(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Qwen's hybrids, whose layers are gated delta nets or attention."""
    own = file.own
    value_heads = file.count(own("ssm.time_step_rank"))
    return {
        **read_recurrent_layers(file, 4),
        "linear_conv_kernel_dim": file.count(own("ssm.conv_kernel")),
        "linear_key_head_dim": file.count(own("ssm.state_size")),
        "linear_num_key_heads": file.count(own("ssm.group_count")),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": file.count(own("ssm.inner_size"), least=value_heads)
        // value_heads,
    }
