"""Small configs of decoders with attention and dense feed-forward layers alone."""

from transformers import (
    ApertusConfig,
    ArceeConfig,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    GlmConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GraniteConfig,
    HunYuanDenseV1Config,
    InternLM3Config,
    Jais2Config,
    LlamaConfig,
    MiniCPM3Config,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    NemotronConfig,
    Olmo2Config,
    Olmo3Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    YoutuConfig,
)

from tests.unit.engine.checkpoints.shapes import (
    DYNAMIC,
    FALCON,
    GEMMA3N,
    GEMMA4,
    GPT,
    LATENT,
    LINEAR,
    LLAMA3,
    LONGROPE,
    PLAIN,
    SHAPE,
    VOCABULARY,
    WIDE,
    YARN,
)

DENSE: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, tied": LlamaConfig(**SHAPE | {"tie_word_embeddings": True}),
    "llama, biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama, multi-head attention": LlamaConfig(**SHAPE | {"num_key_value_heads": 4}),
    "llama, wide heads": LlamaConfig(**SHAPE, head_dim=32),
    "llama, llama3 rope": LlamaConfig(**SHAPE, rope_parameters=LLAMA3),
    "llama, linear rope": LlamaConfig(**SHAPE, rope_parameters=LINEAR),
    "llama, dynamic rope": LlamaConfig(**SHAPE, rope_parameters=DYNAMIC),
    "llama, yarn rope": LlamaConfig(**SHAPE, rope_parameters=YARN),
    "mistral": MistralConfig(**SHAPE, sliding_window=None),
    "mistral, window": MistralConfig(**SHAPE, sliding_window=11),
    "ministral": MinistralConfig(
        **SHAPE,
        head_dim=16,
        sliding_window=11,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen2, tied": Qwen2Config(**SHAPE | {"tie_word_embeddings": True}),
    "qwen2, some windows": Qwen2Config(
        **SHAPE, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "gemma": GemmaConfig(**WIDE | {"tie_word_embeddings": True, "hidden_act": "gelu"}),
    "gemma2": Gemma2Config(**WIDE, query_pre_attn_scalar=24, sliding_window=9),
    "gemma2, no caps": Gemma2Config(
        **WIDE,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        layer_types=["full_attention", "full_attention", "sliding_attention"],
    ),
    "gemma3": Gemma3TextConfig(
        **WIDE | {"tie_word_embeddings": True, "sliding_window_pattern": 2},
        query_pre_attn_scalar=24,
        sliding_window=9,
        final_logit_softcapping=20.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "gemma4, shared keys": Gemma4TextConfig(
        **GEMMA4,
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        use_double_wide_mlp=True,
        final_logit_softcapping=5.0,
    ),
    "gemma4, experts": Gemma4TextConfig(  # type: ignore[call-arg]
        **GEMMA4
        | {
            "num_hidden_layers": 4,
            "head_dim": 32,
            "global_head_dim": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=1,
        enable_moe_block=True,
        num_experts=5,
        top_k_experts=2,
        moe_intermediate_size=32,
        final_logit_softcapping=5.0,
    ),
    "gemma3n": Gemma3nTextConfig(
        **GEMMA3N, num_kv_shared_layers=2, intermediate_size=[96, 96, 96, 64, 64]
    ),
    "gemma3n, sparse": Gemma3nTextConfig(
        **GEMMA3N,
        intermediate_size=96,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.9, 0.5, 0.0, 0.0, 0.0],
        altup_num_inputs=3,
        altup_active_idx=1,
        altup_correct_scale=False,
    ),
    "phi3": Phi3Config(**SHAPE, sliding_window=30),
    "phi3, long": Phi3Config(
        **SHAPE, original_max_position_embeddings=32, rope_parameters=LONGROPE
    ),
    "phi3, short": Phi3Config(
        **SHAPE, original_max_position_embeddings=256, rope_parameters=LONGROPE
    ),
    "olmo2": Olmo2Config(**SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "olmo3": Olmo3Config(
        **SHAPE,
        sliding_window=9,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": YARN, "sliding_attention": PLAIN},
    ),
    "glm": GlmConfig(**SHAPE, head_dim=24),
    "glm4": Glm4Config(**WIDE, partial_rotary_factor=0.25),  # type: ignore[call-arg]
    "cohere": CohereConfig(**SHAPE | {"tie_word_embeddings": True}, logit_scale=0.5),
    "cohere, norms": CohereConfig(
        **SHAPE | {"num_attention_heads": 2}, attention_bias=True, use_qk_norm=True
    ),
    "cohere2": Cohere2Config(  # type: ignore[call-arg]
        **SHAPE, sliding_window=9, sliding_window_pattern=2, rope_parameters=PLAIN
    ),
    "exaone4": Exaone4Config(**SHAPE, sliding_window=9, sliding_window_pattern=2),
    "exaone4, no windows": Exaone4Config(
        **SHAPE, sliding_window=None, layer_types=["full_attention"] * 3
    ),
    "gpt-neox": GPTNeoXConfig(**SHAPE | {"num_attention_heads": 2}),
    "gpt-neox, in turn": GPTNeoXConfig(  # type: ignore[call-arg]
        **SHAPE | {"num_key_value_heads": 4},
        use_parallel_residual=False,
        attention_bias=False,
        rotary_pct=0.5,
    ),
    "phi": PhiConfig(**SHAPE),
    "stablelm": StableLmConfig(**SHAPE, use_qkv_bias=True, partial_rotary_factor=0.5),  # type: ignore[call-arg]
    "stablelm, norms": StableLmConfig(**SHAPE, qk_layernorm=True, use_parallel_residual=True),
    "nemotron": NemotronConfig(**WIDE, attention_bias=True, mlp_bias=True),
    "arcee": ArceeConfig(**SHAPE, mlp_bias=True),
    "hunyuan": HunYuanDenseV1Config(**WIDE, attention_bias=True),
    "hunyuan, stretched": HunYuanDenseV1Config(
        **WIDE, rope_parameters=PLAIN | {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0}
    ),
    "apertus": ApertusConfig(**SHAPE | {"num_attention_heads": 2}),
    "cwm": CwmConfig(
        **SHAPE | {"num_hidden_layers": 5}, head_dim=16, sliding_window=9, rope_parameters=LLAMA3
    ),
    "jais2": Jais2Config(**WIDE),
    "ernie": Ernie4_5Config(**SHAPE, head_dim=24, use_bias=True),
    "ministral3": Ministral3Config(
        **SHAPE,
        head_dim=24,
        sliding_window=30,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.4},
    ),
    "internlm3": InternLM3Config(**WIDE, attention_bias=True, mlp_bias=True),
    "seed oss": SeedOssConfig(**WIDE, attention_out_bias=True, mlp_bias=True),
    "granite": GraniteConfig(
        **SHAPE,
        attention_bias=True,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=5.0,
    ),
    "smollm3": SmolLM3Config(**SHAPE, no_rope_layer_interval=2),
    "smollm3, windows": SmolLM3Config(
        **SHAPE, no_rope_layers=[0, 1, 0], use_sliding_window=True, sliding_window=9
    ),
    "starcoder2": Starcoder2Config(
        **SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True},
        sliding_window=30,
    ),
    "starcoder2, no biases": Starcoder2Config(**SHAPE, use_bias=False),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=64,
        n_head=2,
        n_layer=3,
        n_positions=256,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "gpt bigcode": GPTBigCodeConfig(**GPT, n_head=4),
    "gpt bigcode, own keys": GPTBigCodeConfig(**GPT, n_head=2, multi_query=False),
    "gpt-neo": GPTNeoConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_layers=4,
        num_heads=2,
        attention_types=[[["global", "local"], 2]],
        window_size=9,
        max_position_embeddings=256,
        initializer_range=0.2,
    ),
    "gpt-j": GPTJConfig(**GPT, n_head=2, rotary_dim=16),
    "opt": OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=256,
        init_std=0.2,
    ),
    "falcon": FalconConfig(**FALCON, num_attention_heads=4),
    "falcon, two norms": FalconConfig(
        **FALCON, num_attention_heads=4, num_kv_heads=2, new_decoder_architecture=True, bias=True
    ),
    "falcon, one norm": FalconConfig(
        **FALCON,
        num_attention_heads=4,
        num_kv_heads=2,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
    ),
    "falcon, in turn": FalconConfig(
        **FALCON, num_attention_heads=2, multi_query=False, parallel_attn=False, bias=True
    ),
    "youtu": YoutuConfig(**LATENT, rope_interleave=False),
    "minicpm3": MiniCPM3Config(**LATENT, scale_emb=3, dim_model_base=40),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "qwen3, tied": Qwen3Config(**SHAPE | {"tie_word_embeddings": True}, head_dim=32),
}
