"""Laguna of a GGUF file: heads and gates of its layers, and its experts, as keys of config.json."""

from services.common.gguf.gguf_experts import read_sigmoid_routing
from services.common.gguf.gguf_file import GgufFile
from services.common.gguf.gguf_layers import count_layers, read_later_windows
from services.common.gguf.gguf_rope import read_rope_scaling
from services.common.json_values import Json

__all__ = ["read_laguna"]

_PATTERN = 4
"""Layers of a period, the first of which has no window, where a file does not list them"""


def read_laguna(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Laguna. Layers with a window rotate without scaling.

    The width of a gate says whether it has a number per head or per element.
    """
    own, layers = file.own, count_layers(file)
    heads = file.integers(own("attention.head_count"), layers, least=1)[:layers]
    gate = file.tensors.get("blk.0.attn_gate.weight")
    head_dim = file.count(own("attention.key_length"))
    base = file.positive(own("rope.freq_base"), 10000.0)
    rotated = file.count(own("rope.dimension_count"), head_dim)
    near = file.count(own("rope.dimension_count_swa"), head_dim)
    return {
        **read_sigmoid_routing(file),
        **read_later_windows(file, _PATTERN),
        "gating": "per-head" if gate is not None and gate.shape[0] == heads[0] else "per-element",
        "moe_num_shared_experts": None,  # the file has the width of all of them together
        "num_attention_heads_per_layer": [*heads],
        "rope_parameters": {
            "full_attention": {
                **read_rope_scaling(file),
                "rope_theta": base,
                "partial_rotary_factor": rotated / head_dim,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.positive(own("rope.freq_base_swa"), base),
                "partial_rotary_factor": near / head_dim,
            },
        },
    }
