"""Keys of Cohere's models, from a GGUF file."""

from services.common.gguf.gguf_experts import read_sigmoid_routing
from services.common.gguf.gguf_file import GgufFile
from services.common.gguf.gguf_layers import (
    read_later_windows,
    read_windows,
)
from services.common.json_values import Json

__all__ = ["read_cohere", "read_cohere_experts"]


def read_cohere(file: GgufFile) -> dict[str, Json]:
    return {
        "logit_scale": file.number(file.own("logit_scale")),
        **read_windows(file, 4),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def read_cohere_experts(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Command A+, which has LayerNorms, and North Mini Code, which has RMSNorms.

    The name of the epsilon tells them apart.
    """
    norms: dict[str, Json] = {}
    if file.own("attention.layer_norm_rms_epsilon") not in file.metadata:
        epsilon = file.positive(file.own("attention.layer_norm_epsilon"))
        norms = {"layer_norm_eps": epsilon, "rms_norm_eps": None}
    return {
        **read_sigmoid_routing(file),
        **read_later_windows(file, 4),
        **norms,
        "expert_selection_fn": "sigmoid",
        "logit_scale": file.positive(file.own("logit_scale")),
    }
