"""Decoders with attention and mixtures of experts: a row for each architecture."""

from dataclasses import replace

from services.engine.model.checkpoint.family import (
    ExpertStack,
    ExpertTensorNames,
    Family,
    QkNorm,
    TensorNames,
    WindowRule,
)
from services.engine.model.checkpoint.shared_names import (
    EXPERTS,
    HUNYUAN,
    MIXTRAL_EXPERTS,
    OLMO2,
    QWEN_EXPERTS,
    QWEN_WINDOWS,
    USE_BIAS,
)

__all__ = ["EXPERT_FAMILIES"]

_PHIMOE = Family(
    "PhimoeForCausalLM",
    names=TensorNames(experts=replace(MIXTRAL_EXPERTS, router_name="router")),
    defaults={
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "num_local_experts": 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "router_jitter_noise": 0.01,
    },
    reads_attention_bias=True,
    head_bias_key="lm_head_bias",
    layer_norm=True,
    windows=WindowRule.ALL,
    mixes_sparsely=True,
)

_GRANITE_EXPERTS = ExpertTensorNames(
    router="block_sparse_moe.router.layer",
    gate=("block_sparse_moe.input_linear",),
    down="block_sparse_moe.output_linear",
    stack=ExpertStack(suffix=".weight"),
    module="block_sparse_moe",
    router_name="router",
)
_GRANITE = Family(
    "GraniteMoeForCausalLM",
    names=TensorNames(experts=_GRANITE_EXPERTS),
    defaults={"norm_topk_prob": True, "num_experts_per_tok": 2, "num_local_experts": 8},
    reads_attention_bias=True,
    reads_multipliers=True,
)

EXPERT_FAMILIES: tuple[Family, ...] = (
    Family(
        "MixtralForCausalLM",
        names=TensorNames(experts=MIXTRAL_EXPERTS),
        defaults={"norm_topk_prob": True, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        windows=WindowRule.ALL,
    ),
    _PHIMOE,
    replace(_PHIMOE, architecture="PhiMoEForCausalLM"),
    _GRANITE,
    replace(
        _GRANITE,
        architecture="GraniteMoeSharedForCausalLM",
        names=replace(
            _GRANITE.names,
            experts=replace(
                _GRANITE_EXPERTS,
                shared_gate=("shared_mlp.input_linear",),
                shared_down="shared_mlp.output_linear",
            ),
        ),
        keys={"shared_expert_intermediate_size": "shared_intermediate_size"},
        defaults={**_GRANITE.defaults, "shared_intermediate_size": 0},
    ),
    Family(
        "Ernie4_5_MoeForCausalLM",
        names=TensorNames(
            experts=replace(
                EXPERTS,
                shared_gate=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"),
                shared_down="mlp.shared_experts.down_proj",
                choice_bias="mlp.moe_statics.e_score_correction_bias",
            ),
            ignored=("*.rotary_emb.inv_freq", "model.mtp_*"),
        ),
        keys={
            **USE_BIAS,
            "decoder_sparse_step": "moe_layer_interval",
            "num_local_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
        },
        defaults={
            "moe_intermediate_size": 1536,
            "moe_layer_start_index": 1,
            "moe_norm_min": 1e-12,
            "moe_num_shared_experts": 2,
            "norm_topk_prob": True,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        reads_attention_bias=True,
        reads_mlp_bias=True,
        head_bias_key="use_bias",
        interleaved_rotary=True,
    ),
    Family(
        "HunYuanMoEV1ForCausalLM",
        names=replace(
            HUNYUAN,
            experts=replace(
                EXPERTS,
                router="mlp.gate.wg",
                shared_gate=("mlp.shared_mlp.gate_proj", "mlp.shared_mlp.up_proj"),
                shared_down="mlp.shared_mlp.down_proj",
                router_name="gate.wg",
            ),
        ),
        keys={
            "moe_intermediate_size": "intermediate_size",
            "num_experts_per_tok": "moe_topk",
            "shared_expert_intermediate_size": "intermediate_size",
        },
        defaults={
            "norm_topk_prob": True,
            "num_experts_per_tok": 1,
            "num_local_experts": 1,
            "rms_norm_eps": 1e-5,
        },
        reads_attention_bias=True,
        qk_norm=QkNorm.HEAD_ROTATED,
    ),
    Family(
        "Qwen2MoeForCausalLM",
        names=TensorNames(experts=QWEN_EXPERTS),
        keys={"attention_bias": "qkv_bias"},
        defaults={
            **QWEN_WINDOWS,
            "moe_intermediate_size": 1408,
            "num_local_experts": 60,
            "num_experts_per_tok": 4,
            "num_key_value_heads": 16,
            "qkv_bias": True,
            "shared_expert_intermediate_size": 5632,
            "sliding_window": 4096,
        },
        reads_attention_bias=True,
        output_bias_key=None,
        windows=WindowRule.EVEN,
    ),
    Family(
        "OlmoeForCausalLM",
        names=TensorNames(experts=EXPERTS),
        defaults={"num_local_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5},
        reads_attention_bias=True,
        qk_norm=QkNorm.ALL_HEADS,
        refused=("clip_qkv",),
    ),
    Family(
        "FlexOlmoForCausalLM",
        names=replace(OLMO2, experts=EXPERTS),
        defaults={"num_local_experts": 7, "num_experts_per_tok": 5, "rope_theta": 500_000.0},
        reads_attention_bias=True,
        qk_norm=QkNorm.ALL_HEADS,
    ),
    Family(
        "MellumForCausalLM",
        names=TensorNames(experts=EXPERTS, ignored=("*.rotary_emb.inv_freq", "mtp.*")),
        defaults={
            "head_dim": 128,
            "moe_intermediate_size": 896,
            "norm_topk_prob": True,
            "num_experts_per_tok": 8,
            "num_key_value_heads": 4,
            "num_local_experts": 64,
            "rope_theta": 500_000.0,
            "sliding_window": 1024,
            "sliding_window_pattern": 1,
        },
        reads_attention_bias=True,
        qk_norm=QkNorm.HEAD,
        windows=WindowRule.PATTERN,
        local_rotary=True,
    ),
    Family(
        "Qwen3MoeForCausalLM",
        names=TensorNames(experts=EXPERTS),
        defaults={"use_sliding_window": False},
        reads_attention_bias=True,
        qk_norm=QkNorm.HEAD,
        windows=WindowRule.ALL,
    ),
    Family(
        "GptOssForCausalLM",
        names=TensorNames(
            sinks="self_attn.sinks",
            experts=ExpertTensorNames(
                router="mlp.router",
                gate=("mlp.experts.gate_up_proj",),
                down="mlp.experts.down_proj",
                stack=ExpertStack(transposed=True, alternates=True),
            ),
        ),
        defaults={
            "attention_bias": True,
            "head_dim": 64,
            "mlp_bias": True,
            "norm_topk_prob": True,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 2,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        reads_attention_bias=True,
        reads_mlp_bias=True,
        experts_have_bias=True,
        windows=WindowRule.PATTERN,
        clamped_swiglu=True,
    ),
)
