"""Latent attention of a GGUF file: the model that has it, and its keys of config.json."""

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_rope import rope_scaling
from services.common.json_values import Json

__all__ = ["latent", "latent_model"]

_SIGMOIDS = 2
"""Number of sigmoids among llama.cpp's functions of experts' scores"""
_GLM_VOCABULARY = 154_880


def latent_model(file: GgufFile) -> str:
    """Return the architecture in transformers: DeepSeek V2 or V3, or a dense model.

    Raises GgufError for Mistral Large 3, whose queries grow with the position.
    """
    if (growth := "deepseek2.attention.temperature_scale") in file.metadata:
        raise GgufError(f"{file.path}: {growth} (Mistral Large 3) is not supported.")
    if "deepseek2.expert_count" not in file.metadata:
        return "YoutuForCausalLM"
    gating = file.integer("deepseek2.expert_gating_func", 0)
    table = file.tensors.get("token_embd.weight")
    # files of GLM-4.7 Flash don't say that experts are weighed by sigmoids
    is_glm = not gating and table is not None and table.shape[0] == _GLM_VOCABULARY
    return "DeepseekV3ForCausalLM" if gating == _SIGMOIDS or is_glm else "DeepseekV2ForCausalLM"


def latent(file: GgufFile) -> dict[str, Json]:
    """Return the keys of latent attention and of DeepSeek's experts."""

    def integer(key: str, default: int | None = None) -> int:
        return file.integer(f"deepseek2.{key}", default)

    rotated, vectors = integer("rope.dimension_count"), integer("attention.q_lora_rank", 0)
    groups = integer("expert_group_count", 1)
    values: dict[str, Json] = {
        "attention_bias": False,
        "first_k_dense_replace": integer("leading_dense_block_count", 0),
        "kv_lora_rank": integer("attention.kv_lora_rank"),
        "n_group": groups,
        "n_routed_experts": integer("expert_count", 0),
        "n_shared_experts": integer("expert_shared_count", 0),
        "norm_topk_prob": file.flag("deepseek2.expert_weights_norm", False),
        "num_key_value_heads": integer("attention.head_count"),
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": vectors or None,
        "qk_nope_head_dim": integer("attention.key_length_mla") - rotated,
        "qk_rope_head_dim": rotated,
        "routed_scaling_factor": file.number("deepseek2.expert_weights_scale", 1.0),
        "topk_group": integer("expert_group_used_count", 1),
        "v_head_dim": integer("attention.value_length_mla"),
    }
    if file.integer("deepseek2.expert_gating_func", 0) != _SIGMOIDS and groups > 1:
        values["topk_method"] = "group_limited_greedy"
    scaling, weight = rope_scaling(file), "deepseek2.rope.scaling.yarn_log_multiplier"
    if scaling["rope_type"] != "default" and weight in file.metadata:
        # the converter writes a tenth, and llama.cpp takes both factors as equal
        factor = file.number(weight) * 10
        values["rope_scaling"] = {**scaling, "mscale": factor, "mscale_all_dim": factor}
    return values
