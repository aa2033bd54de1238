"""Decoders whose experts are weighed by sigmoids: a row for each architecture."""

from dataclasses import replace

from services.engine.model.checkpoint.family import Family, QkNorm, TensorNames, WindowRule
from services.engine.model.checkpoint.shared_names import (
    BIASED_EXPERTS,
    DEEPSEEK_KEYS,
    EXPERTS,
    MIXTRAL_EXPERTS,
)

__all__ = ["SIGMOID_FAMILIES"]

SIGMOID_FAMILIES: tuple[Family, ...] = (
    Family(
        "Glm4MoeForCausalLM",
        names=TensorNames(experts=BIASED_EXPERTS),
        keys=DEEPSEEK_KEYS,
        defaults={
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-5,
        },
        reads_attention_bias=True,
        output_bias_key=None,
        qk_norm=QkNorm.HEAD,
        qk_norm_key="use_qk_norm",
        scores_by_sigmoid=True,
    ),
    Family(
        "SolarOpenForCausalLM",
        names=TensorNames(experts=BIASED_EXPERTS),
        keys=DEEPSEEK_KEYS,
        defaults={
            "head_dim": 128,
            "moe_intermediate_size": 1280,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
        },
        reads_attention_bias=True,
        output_bias_key=None,
        scores_by_sigmoid=True,
    ),
    Family(
        "MiniMaxM2ForCausalLM",
        names=TensorNames(
            experts=replace(
                MIXTRAL_EXPERTS,
                choice_bias="block_sparse_moe.e_score_correction_bias",
                choice_bias_is_row=False,
            )
        ),
        defaults={
            "head_dim": 128,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "num_local_experts": 256,
            "rope_theta": 5e6,
        },
        qk_norm=QkNorm.ALL_HEADS,
        scores_by_sigmoid=True,
    ),
    Family(
        "Dots1ForCausalLM",
        names=TensorNames(experts=BIASED_EXPERTS),
        keys=DEEPSEEK_KEYS,
        defaults={
            "max_window_layers": 62,
            "moe_intermediate_size": 1408,
            "n_group": 1,
            "num_key_value_heads": 32,
            "sliding_window": 4096,
        },
        reads_attention_bias=True,
        qk_norm=QkNorm.HEAD,
        windows=WindowRule.LISTED,
        scores_by_sigmoid=True,
    ),
    Family(
        "HYV3ForCausalLM",
        names=TensorNames(
            experts=replace(
                EXPERTS,
                router="mlp.router.gate",
                router_name="gate",
                shared_gate=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
                shared_down="mlp.shared_mlp.down_proj",
                choice_bias="mlp.expert_bias",
                choice_bias_is_row=False,
            )
        ),
        keys={
            "moe_layer_start_index": "first_k_dense_replace",
            "moe_num_shared_experts": "num_shared_experts",
            "num_local_experts": "num_experts",
            "routed_scaling_factor": "router_scaling_factor",
        },
        defaults={
            "first_k_dense_replace": 1,
            "head_dim": 128,
            "moe_intermediate_size": 1536,
            "norm_topk_prob": True,
            "num_experts": 192,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1,
            "num_shared_experts": 1,
            "rms_norm_eps": 1e-5,
            "rope_theta": 11_158_840.0,
            "router_scaling_factor": 2.826,
        },
        reads_attention_bias=True,
        reads_mlp_bias=True,
        qk_norm=QkNorm.HEAD,
        scores_by_sigmoid=True,
    ),
)
