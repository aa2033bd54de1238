"""Names and values that several families have in common."""

from dataclasses import replace

from services.engine.model.checkpoint.config import JsonObject
from services.engine.model.checkpoint.expert_names import ExpertTensorNames
from services.engine.model.checkpoint.family import TensorNames

__all__ = [
    "BIASED_EXPERTS",
    "DEEPSEEK_EXPERTS",
    "DEEPSEEK_KEYS",
    "EXPERTS",
    "HUNYUAN",
    "LATENT_WIDTHS",
    "MIXTRAL_EXPERTS",
    "OLMO2",
    "QWEN_EXPERTS",
    "QWEN_WINDOWS",
    "USE_BIAS",
]

OLMO2 = TensorNames(
    attention_norm=None,
    attention_post_norm="post_attention_layernorm",
    feed_forward_norm=None,
    feed_forward_post_norm="post_feedforward_layernorm",
)
HUNYUAN = TensorNames(query_norm="self_attn.query_layernorm", key_norm="self_attn.key_layernorm")
EXPERTS = ExpertTensorNames(
    router="mlp.gate",
    gate=("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj"),
    down="mlp.experts.{}.down_proj",
)
USE_BIAS = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
MIXTRAL_EXPERTS = ExpertTensorNames(
    router="block_sparse_moe.gate",
    gate=("block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3"),
    down="block_sparse_moe.experts.{}.w2",
)
QWEN_EXPERTS = replace(
    EXPERTS,
    shared_gate=("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
    shared_down="mlp.shared_expert.down_proj",
    shared_router="mlp.shared_expert_gate",
)
DEEPSEEK_EXPERTS = replace(
    EXPERTS,
    shared_gate=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
    shared_down="mlp.shared_experts.down_proj",
)
BIASED_EXPERTS = replace(
    DEEPSEEK_EXPERTS,
    choice_bias="mlp.gate.e_score_correction_bias",
    choice_bias_is_row=False,
)
DEEPSEEK_KEYS = {
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_num_shared_experts": "n_shared_experts",
    "num_local_experts": "n_routed_experts",
}
LATENT_WIDTHS: JsonObject = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QWEN_WINDOWS: JsonObject = {"use_sliding_window": False, "max_window_layers": 28}
