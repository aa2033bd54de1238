"""Decoders with latent attention: a row for each architecture."""

from dataclasses import replace

from services.engine.model.checkpoint.attention_names import IndexNames, LatentNames
from services.engine.model.checkpoint.family import Family, TensorNames
from services.engine.model.checkpoint.shared_names import (
    BIASED_EXPERTS,
    DEEPSEEK_EXPERTS,
    DEEPSEEK_KEYS,
    LATENT_WIDTHS,
)

__all__ = ["LATENT_FAMILIES"]

_DEEPSEEK_V3 = Family(
    "DeepseekV3ForCausalLM",
    names=TensorNames(
        latent=LatentNames(),
        experts=BIASED_EXPERTS,
    ),
    keys=DEEPSEEK_KEYS,
    defaults={
        **LATENT_WIDTHS,
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
        "topk_group": 4,
    },
    interleaved_rotary=True,
    scores_by_sigmoid=True,
)
_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3,
    architecture="DeepseekV32ForCausalLM",
    names=replace(_DEEPSEEK_V3.names, latent=LatentNames(index=IndexNames())),
    defaults={
        **_DEEPSEEK_V3.defaults,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 2048,
    },
)

LATENT_FAMILIES: tuple[Family, ...] = (
    Family(
        "DeepseekV2ForCausalLM",
        names=TensorNames(latent=LatentNames(), experts=DEEPSEEK_EXPERTS),
        keys=DEEPSEEK_KEYS,
        defaults={
            **LATENT_WIDTHS,
            "first_k_dense_replace": 0,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
        },
        reads_mlp_bias=True,
        interleaved_rotary=True,
        refused=("norm_topk_prob",),
    ),
    _DEEPSEEK_V3,
    _DEEPSEEK_V32,
    replace(
        _DEEPSEEK_V32,
        architecture="GlmMoeDsaForCausalLM",
        defaults={
            **_DEEPSEEK_V32.defaults,
            "index_n_heads": 32,
            "indexer_rope_interleave": True,
            "n_group": 1,
            "q_lora_rank": 2048,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5,
            "topk_group": 1,
            "v_head_dim": 256,
        },
    ),
    replace(
        _DEEPSEEK_V3,
        architecture="Glm4MoeLiteForCausalLM",
        defaults={
            **_DEEPSEEK_V3.defaults,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 1536,
            "n_group": 1,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 20,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
            "topk_group": 1,
            "v_head_dim": 256,
        },
    ),
    Family(
        "Mistral4ForCausalLM",
        names=TensorNames(
            latent=LatentNames(),
            experts=DEEPSEEK_EXPERTS,
            stacked_experts=replace(
                DEEPSEEK_EXPERTS,
                gate=("mlp.experts.gate_up_proj",),
                down="mlp.experts.down_proj",
            ),
        ),
        keys=DEEPSEEK_KEYS,
        defaults={
            "first_k_dense_replace": 0,
            "kv_lora_rank": 256,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 32,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "rope_scaling": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 128.0,
                "original_max_position_embeddings": 8192,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
            "topk_method": "group_limited_greedy",
            "v_head_dim": 128,
        },
        interleaved_rotary=True,
        ranks_groups_by_two=True,
    ),
    Family(
        "YoutuForCausalLM",
        names=TensorNames(latent=LatentNames()),
        defaults={**LATENT_WIDTHS, "num_key_value_heads": 16, "tie_word_embeddings": True},
        interleaved_rotary=True,
    ),
    Family(
        "MiniCPM3ForCausalLM",
        names=TensorNames(latent=LatentNames()),
        keys={"embedding_multiplier": "scale_emb"},
        defaults={
            "dim_model_base": 256,
            "kv_lora_rank": 256,
            "num_key_value_heads": 40,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "rms_norm_eps": 1e-5,
            "scale_depth": 1.4,
            "scale_emb": 12,
            "tie_word_embeddings": True,
        },
        reads_multipliers=True,
        reads_depth=True,
    ),
)
