"""Latent attention of a GGUF file: the model that has it, and its keys of config.json."""

from services.common.gguf.gguf_experts import SIGMOIDS, read_routing
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_rope import read_rope_scaling
from services.common.json_values import Json

__all__ = ["choose_latent_model", "read_latent"]

_GLM_VOCABULARY = 154_880


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
