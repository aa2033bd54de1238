"""Keys of IBM's Granite models, from a GGUF file."""

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_recurrent import read_attention_layers, read_mamba
from services.common.json_values import Json

__all__ = ["read_granite", "read_granite_hybrid"]


def read_granite(file: GgufFile, attention: float = 1.0) -> dict[str, Json]:
    """Return the multipliers. attention: factor on scores if the file has none."""
    return {
        "embedding_multiplier": file.positive(file.own("embedding_scale"), 1.0),
        "residual_multiplier": file.positive(file.own("residual_scale"), 1.0),
        "attention_multiplier": file.positive(file.own("attention.scale"), attention),
        "logits_scaling": file.positive(file.own("logit_scale"), 1.0),
    }


def read_granite_hybrid(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Granite 4, whose layers are Mamba-2 or attention.

    Raises GgufError for Bamba: the converter reorders its heads as if they rotated as a whole.
    """
    own = file.own
    rotates = file.flag(own("rope.scaling.finetuned"), True)
    heads = file.count(own("attention.head_count"))
    width = file.count(own("embedding_length"), least=heads) // heads
    if rotates and file.count(own("rope.dimension_count"), width) < width:
        key = own("rope.dimension_count")
        raise GgufError(f"{file.path}: {key} is less than a head (Bamba), which is not supported.")
    dense = file.integer(own("feed_forward_length"))
    return {
        **read_granite(file, width**-0.5),
        **read_attention_layers(file, "linear_attention"),
        **read_mamba(file),
        "norm_topk_prob": True,
        "num_local_experts": file.integer(own("expert_count"), 0),
        "position_embedding_type": "rope" if rotates else None,
        "shared_intermediate_size": file.integer(own("expert_shared_feed_forward_length"), dense),
    }
