"""Latent and indexed attention of a GGUF file: choice of the model, and keys of config.json."""

from services.common.gguf.gguf_experts import SIGMOIDS, read_routing, read_sigmoid_routing
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_layers import count_layers
from services.common.gguf.gguf_recurrent import read_attention_layers
from services.common.gguf.gguf_rope import read_rope_scaling
from services.common.json_values import Json

__all__ = [
    "choose_latent_model",
    "read_block_indexes",
    "read_indexed",
    "read_kimi_linear",
    "read_latent",
    "read_unsplit_latent",
]

_GLM_VOCABULARY = 154_880
_GLM52_CONTEXT = 2**20
"""Context of GLM-5.2, whose first files don't tell which layers have an indexer"""
_GLM52_INDEXERS: dict[str, Json] = {"index_topk_freq": 4, "index_skip_topk_offset": 3}


def choose_latent_model(file: GgufFile) -> str:
    """Return the architecture in transformers: DeepSeek V2 or V3, or a dense model.

    Mistral Large 3 is Mistral 4 with other widths. Raises GgufError for experts that another
    function weighs.
    """
    if "deepseek2.expert_count" not in file.metadata:
        return "YoutuForCausalLM"
    if _has_sigmoids(file):
        return "DeepseekV3ForCausalLM"
    grows = "deepseek2.attention.temperature_scale" in file.metadata
    return "Mistral4ForCausalLM" if grows else "DeepseekV2ForCausalLM"


def _has_sigmoids(file: GgufFile) -> bool:
    """Return whether sigmoids weigh the experts, as in DeepSeek V3. V2 has a softmax."""
    key = file.own("expert_gating_func")
    gating = file.count(key, 0, least=0, most=SIGMOIDS)
    if gating:
        return gating == SIGMOIDS
    table = file.tensors.get("token_embd.weight")
    if table is not None and table.shape[0] == _GLM_VOCABULARY:
        return True  # files of GLM-4.7 Flash leave the function out
    if any(".exp_probs_b" in name for name in file.tensors):
        raise GgufError(f"{file.path} has exp_probs_b, so {key} must be {SIGMOIDS}, for sigmoids.")
    return False


def read_latent(file: GgufFile) -> dict[str, Json]:
    """Return the keys of latent attention and of DeepSeek's experts."""
    own = file.own
    rotated = file.count(own("rope.dimension_count"))
    vectors = file.count(own("attention.q_lora_rank"), 0, least=0)
    values = {
        **read_routing(file),
        "attention_bias": False,
        "kv_lora_rank": file.count(own("attention.kv_lora_rank")),
        "num_key_value_heads": file.count(own("attention.head_count")),
        "partial_rotary_factor": 1.0,
        "q_lora_rank": vectors or None,
        "qk_nope_head_dim": file.count(own("attention.key_length_mla"), least=rotated + 1)
        - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": file.count(own("attention.value_length_mla")),
    }
    if values["n_group"] != 1 and not _has_sigmoids(file):
        values["topk_method"] = "group_limited_greedy"
    scaling, weight = read_rope_scaling(file), own("rope.scaling.yarn_log_multiplier")
    if scaling["rope_type"] != "default" and weight in file.metadata:
        # the converter writes a tenth, and llama.cpp takes both factors as equal
        factor = file.number(weight) * 10
        values["rope_scaling"] = {**scaling, "mscale": factor, "mscale_all_dim": factor}
    return values


def read_indexed(file: GgufFile) -> dict[str, Json]:
    """Return the keys of latent attention to the tokens that indexers choose."""
    own, layers = file.own, count_layers(file)
    values = {
        **read_latent(file),
        **read_sigmoid_routing(file),
        "index_head_dim": file.count(own("attention.indexer.key_length")),
        "index_n_heads": file.count(own("attention.indexer.head_count")),
        "index_topk": file.count(own("attention.indexer.top_k")),
    }
    if (key := own("attention.indexer.types")) in file.metadata:
        kinds = file.integers(key, layers)[:layers]
        values["indexer_types"] = ["full" if kind else "shared" for kind in kinds]
    elif file.architecture == "glm-dsa" and file.count(own("context_length")) >= _GLM52_CONTEXT:
        values |= _GLM52_INDEXERS
    return values


def read_block_indexes(file: GgufFile) -> dict[str, Json]:
    """Return the keys of MiniMax M3, whose layers with an indexer attend to chosen blocks."""
    own, layers = file.own, range(count_layers(file))
    have_indexers = (f"blk.{layer}.indexer.k_proj.weight" in file.tensors for layer in layers)
    return {
        **read_sigmoid_routing(file),
        "index_block_size": file.count(own("attention.indexer.block_size")),
        "index_head_dim": file.count(own("attention.indexer.key_length")),
        "index_local_blocks": file.count(own("attention.indexer.local_blocks"), least=0),
        "index_n_heads": file.count(own("attention.indexer.head_count")),
        "index_topk_blocks": file.count(own("attention.indexer.top_k")),
        "layer_types": [
            "minimax_m3_sparse" if has_indexer else "full_attention"
            for has_indexer in have_indexers
        ],
        "norm_topk_prob": True,
    }


def read_unsplit_latent(file: GgufFile) -> dict[str, Json]:
    """Return the keys of MiniCPM 3, whose keys and values of latents are one tensor."""
    own = file.own
    rotated = file.count(own("rope.dimension_count"))
    width = file.count(own("attention.key_length"), least=rotated + 1)
    return {
        "kv_lora_rank": file.count(own("attention.kv_lora_rank")),
        "num_key_value_heads": file.count(own("attention.head_count")),
        "partial_rotary_factor": 1.0,
        "q_lora_rank": file.count(own("attention.q_lora_rank")),
        "qk_nope_head_dim": width - rotated,
        "qk_rope_head_dim": rotated,
    }


def read_kimi_linear(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Kimi Linear, whose layers are delta nets or latent attention."""
    return {
        **read_attention_layers(file, "linear_attention"),
        **read_latent(file),
        **read_sigmoid_routing(file),
        "linear_conv_kernel_dim": file.count(file.own("ssm.conv_kernel")),
        "linear_head_dim": file.count(file.own("kda.head_dim")),
        "linear_num_heads": file.count(file.own("attention.head_count")),
        "norm_topk_prob": True,
    }
