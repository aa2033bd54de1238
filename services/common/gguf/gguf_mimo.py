"""Keys of config.json that GGUF files of MiMo V2 Flash state in a way of their own."""

from services.common.gguf.gguf_experts import layers_with_routers, read_sigmoid_routing
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_layers import count_layers, read_windows
from services.common.json_values import Json

__all__ = ["read_mimo"]

_PERIOD = 6
"""Layers of a period, one of which sees all tokens, where a file does not list them"""


def read_mimo(file: GgufFile) -> dict[str, Json]:
    """Return the keys of MiMo V2. Layers with a window have key heads and a RoPE of their own.

    llama.cpp has the normalization of weights in its code. Raises GgufError if layers of one kind
    differ in their key heads.
    """
    own, count = file.own, count_layers(file)
    key = own("attention.head_count_kv")
    windows = read_windows(file, _PERIOD)
    kinds = windows.get("layer_types")
    if not isinstance(kinds, list):
        key = own("attention.sliding_window_pattern")
        raise GgufError(f"{file.path}: {key} must list the layers with a window.")
    heads = file.integers(key, count, least=1)[:count]
    by_kind = {
        kind: {number for number, each in zip(heads, kinds, strict=True) if each == kind}
        for kind in ("full_attention", "sliding_attention")
    }
    if any(len(numbers) > 1 or 0 in numbers for numbers in by_kind.values()):
        raise GgufError(
            f"{file.path}: {key} must be one number for the layers with a window and one for the "
            "others."
        )
    values: dict[str, Json] = {
        key: next(iter(numbers))
        for key, numbers in zip(
            ("num_key_value_heads", "swa_num_key_value_heads"), by_kind.values(), strict=True
        )
        if numbers
    }
    factor = own("attention.value_scale")  # files of older converters leave it to the model
    if factor in file.metadata:
        values["attention_value_scale"] = file.positive(factor)
    return {
        **windows,
        **values,
        **read_sigmoid_routing(file),
        "mlp_layer_types": [
            "sparse" if has_router else "dense" for has_router in layers_with_routers(file)
        ],
        "norm_topk_prob": True,
        "sliding_window_size": file.count(own("attention.sliding_window")),
        "swa_rope_theta": file.positive(own("rope.freq_base_swa"), 10000.0),
        "v_head_dim": file.count(own("attention.value_length")),
    }
