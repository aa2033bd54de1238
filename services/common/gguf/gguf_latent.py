"""Latent attention of a GGUF file: the model that has it, and its keys of config.json."""

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_rope import read_rope_scaling
from services.common.json_values import Json

__all__ = ["choose_latent_model", "read_latent"]

_GATING = "deepseek2.expert_gating_func"
_SIGMOIDS = 2
"""Number of sigmoids among llama.cpp's functions of experts' scores"""
_GLM_VOCABULARY = 154_880


def choose_latent_model(file: GgufFile) -> str:
    """Return the architecture in transformers: DeepSeek V2 or V3, or a dense model.

    Raises GgufError for Mistral Large 3, whose queries grow with the position, and for experts that
    another function weighs.
    """
    if (growth := "deepseek2.attention.temperature_scale") in file.metadata:
        raise GgufError(f"{file.path}: {growth} (Mistral Large 3) is not supported.")
    if "deepseek2.expert_count" not in file.metadata:
        return "YoutuForCausalLM"
    return "DeepseekV3ForCausalLM" if _has_sigmoids(file) else "DeepseekV2ForCausalLM"


def _has_sigmoids(file: GgufFile) -> bool:
    """Return whether sigmoids weigh the experts, as in DeepSeek V3. V2 has a softmax."""
    gating = file.count(_GATING, 0, least=0, most=_SIGMOIDS)
    if gating:
        return gating == _SIGMOIDS
    table = file.tensors.get("token_embd.weight")
    if table is not None and table.shape[0] == _GLM_VOCABULARY:
        return True  # files of GLM-4.7 Flash leave the function out
    if any(".exp_probs_b" in name for name in file.tensors):
        raise GgufError(
            f"{file.path} has exp_probs_b, so {_GATING} must be {_SIGMOIDS}, for sigmoids."
        )
    return False


def read_latent(file: GgufFile) -> dict[str, Json]:
    """Return the keys of latent attention and of DeepSeek's experts."""
    own = file.own
    rotated = file.count(own("rope.dimension_count"))
    vectors = file.integer(own("attention.q_lora_rank"), 0)
    groups = file.count(own("expert_group_count"), 1)
    values: dict[str, Json] = {
        "attention_bias": False,
        "first_k_dense_replace": file.integer(own("leading_dense_block_count"), 0),
        "kv_lora_rank": file.integer(own("attention.kv_lora_rank")),
        "n_group": groups,
        "n_routed_experts": file.integer(own("expert_count"), 0),
        "n_shared_experts": file.integer(own("expert_shared_count"), 0),
        "norm_topk_prob": file.flag(own("expert_weights_norm"), False),
        "num_key_value_heads": file.integer(own("attention.head_count")),
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": vectors or None,
        "qk_nope_head_dim": file.integer(own("attention.key_length_mla")) - rotated,
        "qk_rope_head_dim": rotated,
        "routed_scaling_factor": file.number(own("expert_weights_scale"), 1.0),
        "topk_group": file.count(own("expert_group_used_count"), 1, most=groups),
        "v_head_dim": file.integer(own("attention.value_length_mla")),
    }
    if groups > 1 and not _has_sigmoids(file):
        values["topk_method"] = "group_limited_greedy"
    scaling, weight = read_rope_scaling(file), own("rope.scaling.yarn_log_multiplier")
    if scaling["rope_type"] != "default" and weight in file.metadata:
        # the converter writes a tenth, and llama.cpp takes both factors as equal
        factor = file.number(weight) * 10
        values["rope_scaling"] = {**scaling, "mscale": factor, "mscale_all_dim": factor}
    return values
