"""Dense decoders with RMSNorms: a row for each architecture."""

from dataclasses import replace

from services.engine.model.checkpoint.family import Family, QkNorm, TensorNames, WindowRule
from services.engine.model.checkpoint.shared_names import HUNYUAN, OLMO2, QWEN_WINDOWS, USE_BIAS

__all__ = ["DENSE_FAMILIES"]

_GLM = Family(
    "GlmForCausalLM",
    names=TensorNames(gate=("mlp.gate_up_proj",)),
    defaults={
        "attention_bias": True,
        "head_dim": 128,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    reads_attention_bias=True,
    output_bias_key=None,
    interleaved_rotary=True,
)

DENSE_FAMILIES: tuple[Family, ...] = (
    Family("LlamaForCausalLM", reads_attention_bias=True, reads_mlp_bias=True),
    Family("MistralForCausalLM", windows=WindowRule.ALL),
    Family(
        "MinistralForCausalLM",
        defaults={"max_window_layers": 0, "use_sliding_window": True},
        windows=WindowRule.LISTED,
    ),
    Family("Qwen2ForCausalLM", defaults=QWEN_WINDOWS, qkv_bias=True, windows=WindowRule.LISTED),
    Family(
        "MiMoForCausalLM",
        names=TensorNames(ignored=("model.mtp_layers.*",)),
        defaults=QWEN_WINDOWS,
        qkv_bias=True,
        windows=WindowRule.LISTED,
    ),
    Family(
        "Qwen3ForCausalLM",
        defaults=QWEN_WINDOWS,
        reads_attention_bias=True,
        qk_norm=QkNorm.HEAD,
        windows=WindowRule.LISTED,
    ),
    Family(
        "Phi3ForCausalLM",
        names=TensorNames(qkv=("self_attn.qkv_proj",), gate=("mlp.gate_up_proj",)),
        defaults={"rms_norm_eps": 1e-5},
        windows=WindowRule.ALL,
    ),
    Family(
        "Olmo2ForCausalLM",
        names=OLMO2,
        defaults={"rms_norm_eps": 1e-5},
        reads_attention_bias=True,
        qk_norm=QkNorm.ALL_HEADS,
    ),
    Family(
        "Olmo3ForCausalLM",
        names=OLMO2,
        keys={"rope_local_base_freq": "rope_theta"},
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        reads_attention_bias=True,
        qk_norm=QkNorm.ALL_HEADS,
        windows=WindowRule.PATTERN,
        local_rotary=True,
    ),
    Family(
        "CwmForCausalLM",
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "llama3",
                "rope_theta": 1e6,
                "factor": 16.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192,
            },
            "sliding_window": 8192,
            "sliding_window_pattern": 4,
        },
        reads_mlp_bias=True,
        windows=WindowRule.SPACED,
    ),
    _GLM,
    replace(
        _GLM,
        architecture="Glm4ForCausalLM",
        names=replace(
            _GLM.names,
            attention_post_norm="post_self_attn_layernorm",
            feed_forward_post_norm="post_mlp_layernorm",
        ),
    ),
    Family(
        "Exaone4ForCausalLM",
        names=OLMO2,
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        qk_norm=QkNorm.HEAD,
        windows=WindowRule.PATTERN,
        rotates_windows_only=True,
    ),
    Family(
        "ArceeForCausalLM",
        names=TensorNames(gate=("mlp.up_proj",)),
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        reads_attention_bias=True,
        reads_mlp_bias=True,
        gated=False,
    ),
    Family(
        "ApertusForCausalLM",
        names=TensorNames(
            attention_norm="attention_layernorm",
            feed_forward_norm="feedforward_layernorm",
            gate=("mlp.up_proj",),
            activation="mlp.act_fn",
        ),
        defaults={
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "llama3",
                "rope_theta": 12e6,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
            "rope_theta": 12e6,
        },
        reads_attention_bias=True,
        qk_norm=QkNorm.HEAD,
        gated=False,
    ),
    Family(
        "Ernie4_5ForCausalLM",
        keys=USE_BIAS,
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        reads_attention_bias=True,
        reads_mlp_bias=True,
        interleaved_rotary=True,
    ),
    Family(
        "InternLM3ForCausalLM",
        keys={"attention_bias": "qkv_bias", "mlp_bias": "bias"},
        defaults={"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1e-5},
        reads_attention_bias=True,
        output_bias_key="mlp_bias",
        reads_mlp_bias=True,
    ),
    Family(
        "Ministral3ForCausalLM",
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_scaling": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        windows=WindowRule.ALL,
    ),
    Family(
        "HunYuanDenseV1ForCausalLM",
        names=HUNYUAN,
        defaults={"rms_norm_eps": 1e-5},
        reads_attention_bias=True,
        qk_norm=QkNorm.HEAD_ROTATED,
    ),
    Family(
        "SeedOssForCausalLM",
        defaults={"attention_bias": True, "head_dim": 128, "num_key_value_heads": 8},
        reads_attention_bias=True,
        output_bias_key="attention_out_bias",
        reads_mlp_bias=True,
    ),
    Family(
        "GraniteForCausalLM",
        reads_attention_bias=True,
        reads_mlp_bias=True,
        reads_multipliers=True,
    ),
    Family(
        "SmolLM3ForCausalLM",
        defaults={
            "no_rope_layer_interval": 4,
            "rope_theta": 2e6,
            "tie_word_embeddings": True,
            "use_sliding_window": False,
        },
        reads_attention_bias=True,
        reads_mlp_bias=True,
        windows=WindowRule.LISTED,
        reads_no_rope_layers=True,
    ),
)
