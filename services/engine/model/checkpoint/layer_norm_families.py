"""Decoders with LayerNorms: a row for each architecture."""

from dataclasses import replace

from services.engine.model.checkpoint.family import Family, QkNorm, TensorNames, WindowRule
from services.engine.model.checkpoint.shared_names import DEEPSEEK_EXPERTS

__all__ = ["LAYER_NORM_FAMILIES"]

_COHERE = Family(
    "CohereForCausalLM",
    keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "use_parallel_residual": True,
    },
    reads_attention_bias=True,
    qk_norm=QkNorm.HEAD_LAYER_NORM,
    qk_norm_key="use_qk_norm",
    layer_norm=True,
    norm_bias=False,
    reads_parallel_residual=True,
    shares_norm=True,
    interleaved_rotary=True,
    reads_logit_scale=True,
)

_COHERE2 = replace(
    _COHERE,
    architecture="Cohere2ForCausalLM",
    defaults={
        **_COHERE.defaults,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    qk_norm=QkNorm.NONE,
    windows=WindowRule.PATTERN,
    rotates_windows_only=True,
)

LAYER_NORM_FAMILIES: tuple[Family, ...] = (
    _COHERE,
    _COHERE2,
    replace(
        _COHERE2,
        architecture="Cohere2MoeForCausalLM",
        names=TensorNames(experts=DEEPSEEK_EXPERTS),
        keys={
            **_COHERE2.keys,
            "intermediate_size": "prefix_dense_intermediate_size",
            "moe_intermediate_size": "intermediate_size",
            "moe_layer_start_index": "first_k_dense_replace",
            "moe_num_shared_experts": "num_shared_experts",
            "scoring_func": "expert_selection_fn",
        },
        defaults={
            **_COHERE2.defaults,
            "expert_selection_fn": "softmax",
            "head_dim": 128,
            "norm_topk_prob": True,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_shared_experts": 0,
            "prefix_dense_sliding_window_pattern": 1,
            "shared_expert_combination_strategy": "average",
        },
        reads_norm_kind=True,
        windows=WindowRule.BEHIND_DENSE,
        rotates_dense_layers=True,
        scorings=("softmax", "sigmoid"),
        normalizes_softmax=True,
        reads_combination=True,
        refused=("use_qk_norm",),
        required=("use_gated_activation", "use_parallel_block"),
    ),
    Family(
        "PhiForCausalLM",
        names=TensorNames(
            final_norm="final_layernorm",
            output="self_attn.dense",
            gate=("mlp.fc1",),
            down="mlp.fc2",
        ),
        keys={"rms_norm_eps": "layer_norm_eps"},
        defaults={
            "attention_bias": True,
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "lm_head_bias": True,
            "mlp_bias": True,
            "partial_rotary_factor": 0.5,
            "use_parallel_residual": True,
        },
        reads_attention_bias=True,
        reads_mlp_bias=True,
        head_bias_key="lm_head_bias",
        layer_norm=True,
        reads_parallel_residual=True,
        shares_norm=True,
        gated=False,
        refused=("qk_layernorm",),
    ),
    Family(
        "StableLmForCausalLM",
        names=TensorNames(
            query_norm="self_attn.q_layernorm.norms.{}",
            key_norm="self_attn.k_layernorm.norms.{}",
        ),
        keys={"attention_bias": "use_qkv_bias", "rms_norm_eps": "layer_norm_eps"},
        defaults={
            "layer_norm_eps": 1e-5,
            "num_key_value_heads": 32,
            "partial_rotary_factor": 0.25,
        },
        reads_attention_bias=True,
        output_bias_key=None,
        qk_norm=QkNorm.HEAD_LAYER_NORM,
        qk_norm_key="qk_layernorm",
        layer_norm=True,
        reads_parallel_residual=True,
        shares_norm=True,
    ),
    Family(
        "NemotronForCausalLM",
        names=TensorNames(gate=("mlp.up_proj",)),
        keys={"rms_norm_eps": "norm_eps"},
        defaults={"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        reads_attention_bias=True,
        reads_mlp_bias=True,
        layer_norm=True,
        norm_offset=True,
        gated=False,
    ),
    Family(
        "Jais2ForCausalLM",
        names=TensorNames(gate=("mlp.up_proj",)),
        keys={"rms_norm_eps": "layer_norm_eps"},
        defaults={
            "attention_bias": True,
            "hidden_act": "relu2",
            "layer_norm_eps": 1e-5,
            "mlp_bias": True,
        },
        reads_attention_bias=True,
        reads_mlp_bias=True,
        layer_norm=True,
        gated=False,
    ),
    Family(
        "Starcoder2ForCausalLM",
        names=TensorNames(gate=("mlp.c_fc",), down="mlp.c_proj"),
        keys={
            "attention_bias": "use_bias",
            "mlp_bias": "use_bias",
            "rms_norm_eps": "norm_epsilon",
        },
        defaults={
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": True,
        },
        reads_attention_bias=True,
        reads_mlp_bias=True,
        layer_norm=True,
        gated=False,
        windows=WindowRule.ALL,
    ),
)
