"""Small configs of decoders with experts."""

from transformers import (
    AfmoeConfig,
    Cohere2MoeConfig,
    DbrxConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    ExaoneMoeConfig,
    FlexOlmoConfig,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteMoeConfig,
    GraniteMoeSharedConfig,
    HunYuanMoEV1Config,
    HYV3Config,
    LagunaConfig,
    Llama4TextConfig,
    LongcatFlashConfig,
    MellumConfig,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    MiniMaxM3VLTextConfig,
    Mistral4Config,
    MixtralConfig,
    OlmoeConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SolarOpenConfig,
)

from tests.unit.engine.checkpoints.shapes import (
    COHERE2_MOE,
    COMPRESSED,
    DBRX,
    EXPERTS,
    INDEXED,
    LAGUNA,
    LATENT,
    LLAMA3,
    LONGCAT,
    MINIMAX_M3,
    PLAIN,
    ROUTED,
    SHAPE,
    WIDE,
    YARN,
)

MIXTURES: dict[str, PreTrainedConfig] = {
    "mixtral": MixtralConfig(**WIDE, num_local_experts=5, num_experts_per_tok=2, sliding_window=30),
    "qwen2 moe": Qwen2MoeConfig(
        **SHAPE,
        **EXPERTS,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[0],
    ),
    "qwen2 moe, windows": Qwen2MoeConfig(
        **SHAPE,
        **EXPERTS,
        shared_expert_intermediate_size=40,
        norm_topk_prob=True,
        qkv_bias=False,
        use_sliding_window=True,
        sliding_window=9,
        max_window_layers=2,
    ),
    "phimoe": PhimoeConfig(
        **SHAPE,
        attention_bias=True,
        lm_head_bias=True,
        num_local_experts=5,
        router_jitter_noise=0.3,
        sliding_window=30,
    ),
    "phimoe, wide heads": PhimoeConfig(
        **SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1},
        num_local_experts=5,
        router_jitter_noise=0.3,
    ),
    "dbrx": DbrxConfig(
        **DBRX,
        n_heads=2,
        attn_config={"kv_n_heads": 1, "clip_qkv": 0.7, "rope_theta": 500.0},
        ffn_config={"ffn_hidden_size": 32, "moe_num_experts": 5, "moe_top_k": 2},
    ),
    "dbrx, plain sums": DbrxConfig(
        **DBRX,
        n_heads=4,
        attn_config={"kv_n_heads": 4, "clip_qkv": 8, "rope_theta": 500.0},
        ffn_config={
            "ffn_act_fn": {"name": "gelu"},
            "ffn_hidden_size": 24,
            "moe_num_experts": 5,
            "moe_top_k": 2,
            "moe_normalize_expert_weights": None,
        },
    ),
    "granite moe": GraniteMoeConfig(
        **SHAPE,
        num_local_experts=5,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=5.0,
    ),
    "granite moe, shared": GraniteMoeSharedConfig(
        **SHAPE,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=40,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=5.0,
    ),
    "granite moe, none shared": GraniteMoeSharedConfig(
        **SHAPE,
        num_local_experts=5,
        num_experts_per_tok=2,
        shared_intermediate_size=0,
        attention_multiplier=0.2,
    ),
    "flex olmo": FlexOlmoConfig(**SHAPE, num_experts=5, num_experts_per_tok=2),
    "mellum": MellumConfig(
        **WIDE,
        **EXPERTS,
        sliding_window=9,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        mlp_layer_types=["sparse", "dense", "sparse"],
        rope_parameters={
            "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
    "ernie moe": Ernie4_5_MoeConfig(
        **SHAPE, moe_num_experts=5, moe_k=2, moe_intermediate_size=24, use_bias=True
    ),
    "ernie moe, tied": Ernie4_5_MoeConfig(
        **SHAPE | {"tie_word_embeddings": True},
        moe_num_experts=5,
        moe_k=3,
        moe_intermediate_size=24,
        moe_num_shared_experts=0,
        moe_layer_start_index=0,
        moe_layer_end_index=1,
    ),
    "hunyuan moe": HunYuanMoEV1Config(
        **WIDE, num_experts=5, moe_topk=[1, 3, 2], attention_bias=True
    ),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=5, num_experts_per_tok=2),
    "qwen3 moe": Qwen3MoeConfig(
        **WIDE,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        mlp_only_layers=[1],
    ),
    "qwen3 moe, normalized": Qwen3MoeConfig(
        **WIDE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
    "deepseek v2": DeepseekV2Config(
        **LATENT | ROUTED | {"q_lora_rank": None},
        rope_parameters=YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    ),
    "deepseek v2, groups": DeepseekV2Config(
        **LATENT | ROUTED | {"first_k_dense_replace": 1},
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        attention_bias=True,
    ),
    "deepseek v3": DeepseekV3Config(
        **LATENT | ROUTED | {"first_k_dense_replace": 1},
        n_group=4,
        topk_group=2,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "glm4 moe lite": Glm4MoeLiteConfig(
        **LATENT
        | ROUTED
        | {"q_lora_rank": 32, "v_head_dim": 24, "moe_intermediate_size": 32, "n_shared_experts": 1}
    ),
    "deepseek v3.2": DeepseekV32Config(
        **LATENT | ROUTED | INDEXED | {"first_k_dense_replace": 1},
        n_group=4,
        topk_group=2,
        rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "glm moe dsa": GlmMoeDsaConfig(
        **LATENT
        | ROUTED
        | INDEXED
        | {"num_hidden_layers": 4, "q_lora_rank": 32, "v_head_dim": 24, "index_head_dim": 8},
        first_k_dense_replace=1,
        indexer_types=["full", "full", "shared", "shared"],
    ),
    "deepseek v4": DeepseekV4Config(**COMPRESSED, rope_parameters=dict(YARN)),
    "glm4 moe": Glm4MoeConfig(**WIDE | ROUTED, use_qk_norm=True, attention_bias=True),
    "glm4 moe, groups": Glm4MoeConfig(
        **SHAPE | ROUTED | {"first_k_dense_replace": 2, "norm_topk_prob": False},
        n_group=4,
        topk_group=2,
    ),
    "solar open": SolarOpenConfig(
        **{key: value for key, value in SHAPE.items() if key != "intermediate_size"} | ROUTED,
        head_dim=32,
        attention_bias=True,
    ),
    "minimax m2": MiniMaxM2Config(  # type: ignore[call-arg]
        **SHAPE | {"head_dim": 32}, num_local_experts=5, num_experts_per_tok=2, rotary_dim=16
    ),
    "dots1": Dots1Config(
        **SHAPE | ROUTED,
        first_k_dense_replace=1,
        attention_bias=True,
        sliding_window=9,
        max_window_layers=1,
        norm_topk_prob=True,
    ),
    "k-exaone": ExaoneMoeConfig(
        **SHAPE | {"head_dim": 32},
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        num_shared_experts=2,
        n_group=4,
        topk_group=2,
        sliding_window=9,
        sliding_window_pattern=2,
    ),
    "llama4": Llama4TextConfig(
        **SHAPE | {"num_hidden_layers": 4, "head_dim": 16},
        intermediate_size_mlp=80,
        interleave_moe_layer_step=2,
        num_local_experts=5,
        attention_chunk_size=32,
        no_rope_layer_interval=3,
        floor_scale=8,
        attn_scale=0.4,
    ),
    "llama4, two experts": Llama4TextConfig(
        **WIDE,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_chunk_size=64,
        attention_bias=True,
        use_qk_norm=False,
        attn_temperature_tuning=False,
        no_rope_layers=[1, 1, 0],
        rope_parameters=LLAMA3,
    ),
    "afmoe": AfmoeConfig(
        **SHAPE | {"head_dim": 32, "num_hidden_layers": 4},
        **EXPERTS,
        num_shared_experts=2,
        route_scale=1.5,
        sliding_window=9,
        global_attn_every_n_layers=3,
        mup_enabled=True,
    ),
    "cohere2 moe": Cohere2MoeConfig(  # type: ignore[call-arg]
        **COHERE2_MOE,
        first_k_dense_replace=2,
        prefix_dense_intermediate_size=96,
        prefix_dense_sliding_window_pattern=2,
        sliding_window_pattern=3,
        num_shared_experts=2,
        expert_selection_fn="sigmoid",
    ),
    "cohere2 moe, rms norms": Cohere2MoeConfig(  # type: ignore[call-arg]
        **COHERE2_MOE | {"rms_norm_eps": 1e-6, "norm_topk_prob": False},
        first_k_dense_replace=1,
        prefix_dense_intermediate_size=96,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"] * 2,
        expert_selection_fn="sigmoid",
    ),
    "cohere2 moe, softmax": Cohere2MoeConfig(
        **COHERE2_MOE | {"tie_word_embeddings": False},
        attention_bias=True,
        norm_topk_prob=False,
        num_shared_experts=1,
        shared_expert_combination_strategy="sum",
    ),
    "laguna": LagunaConfig(
        **LAGUNA,
        num_attention_heads_per_layer=[4, 6, 6, 2],
        layer_types=["full_attention", "sliding_attention"] * 2,
        sliding_window=9,
        moe_routed_scaling_factor=2.5,
        rope_parameters={
            "full_attention": {
                **YARN,
                "beta_fast": 64.0,
                "beta_slow": 1.0,
                "attention_factor": 1.0,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": PLAIN | {"partial_rotary_factor": 1.0},
        },
    ),
    "laguna, gates of outputs": LagunaConfig(
        **LAGUNA, gating="per-element", mlp_layer_types=["dense", "dense", "sparse", "sparse"]
    ),
    "hy v3": HYV3Config(
        **WIDE | {"num_shared_experts": 2},
        **EXPERTS,
        attention_bias=True,
        mlp_bias=True,
    ),
    "longcat flash": LongcatFlashConfig(
        **LONGCAT, rope_parameters=YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}
    ),
    "longcat flash, wide": LongcatFlashConfig(  # widths of the tiled kernels
        **LONGCAT
        | {"q_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
        | {"head_dim": 32, "expert_ffn_hidden_size": 32, "zero_expert_num": 6, "moe_topk": 4},
        attention_bias=True,
    ),
    "mimo v2 flash": MiMoV2FlashConfig(  # widths of the tiled kernels
        **WIDE
        | ROUTED
        | {"num_hidden_layers": 4, "head_dim": 96, "v_head_dim": 64, "moe_intermediate_size": 32}
        | {"n_shared_experts": None},
        sliding_window=9,
        layer_types=["full_attention", "sliding_attention"] * 2,
        attention_bias=True,
    ),
    "mimo v2 flash, groups": MiMoV2FlashConfig(
        **SHAPE | ROUTED | {"num_key_value_heads": 1, "n_shared_experts": None},
        head_dim=16,
        v_head_dim=24,
        n_group=4,
        topk_group=2,
        norm_topk_prob=False,
        attention_value_scale=None,
        sliding_window=9,
        rope_parameters={
            "full_attention": PLAIN | {"partial_rotary_factor": 0.5},
            "sliding_attention": PLAIN | {"rope_theta": 100.0, "partial_rotary_factor": 0.25},
        },
    ),
    "minimax m3": MiniMaxM3VLTextConfig(  # widths of the tiled kernels
        **MINIMAX_M3, index_topk_blocks=2, index_block_size=7
    ),
    "mistral4": Mistral4Config(
        **LATENT | ROUTED,
        rope_parameters=YARN | {"mscale": 0.8, "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.4},
    ),
    "mistral4, groups": Mistral4Config(
        **LATENT | ROUTED | {"first_k_dense_replace": 1}, n_group=4, topk_group=2
    ),
    "gpt-oss": GptOssConfig(
        **WIDE,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=9,
        rope_parameters=YARN | {"truncate": False},
        swiglu_limit=0.8,
    ),
}
