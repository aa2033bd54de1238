"""Small random checkpoints made by transformers, and a driver that runs a decoder on them."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AfmoeConfig,
    ApertusConfig,
    ArceeConfig,
    BailingHybridConfig,
    BambaConfig,
    Cohere2Config,
    CohereConfig,
    CwmConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV4Config,
    DeepseekV32Config,
    Dots1Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconConfig,
    FalconH1Config,
    FalconMambaConfig,
    FlexOlmoConfig,
    Gemma2Config,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    GraniteMoeSharedConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    HYV3Config,
    Idefics3Config,
    InternLM3Config,
    Jais2Config,
    JambaConfig,
    KimiLinearConfig,
    LaraMiniConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Lfm3Config,
    Llama4TextConfig,
    LlamaConfig,
    LlavaConfig,
    Mamba2Config,
    MambaConfig,
    MellumConfig,
    MiniCPM3Config,
    MiniMaxConfig,
    MiniMaxM2Config,
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    Ministral3Config,
    MinistralConfig,
    Mistral3Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OlmoHybridConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLTextConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen2VLTextConfig,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
    Qwen3VLMoeTextConfig,
    Qwen3VLTextConfig,
    RecurrentGemmaConfig,
    SeedOssConfig,
    SmolLM3Config,
    SmolVLMConfig,
    SolarOpenConfig,
    StableLmConfig,
    Starcoder2Config,
    YoutuConfig,
    Zamba2Config,
    ZambaConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from services.engine.batch.step_batch import OutputRows, StateSegments, StepBatch
from services.engine.execution.piece_graphs import PieceGraphs
from services.engine.model.model import Model

VOCABULARY = 97

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
WIDE = SHAPE | {"head_dim": 32}  # head dimension of the tiled kernels
EXPERTS: dict[str, Any] = {
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
_PLAIN = {"rope_type": "default", "rope_theta": 500.0}
_LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "partial_rotary_factor": 0.75,
}
_MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}
DELTA_NET: dict[str, Any] = {
    "initializer_range": 0.12,
    "num_hidden_layers": 4,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
OLMO_HYBRID: dict[str, Any] = SHAPE | {
    "initializer_range": 0.12,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,  # keys as wide as values, for transformers cuts a tensor in thirds
    "linear_value_head_dim": 12,
}
LATENT: dict[str, Any] = SHAPE | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
ROUTED: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
INDEXED: dict[str, Any] = {
    "index_topk": 16,
    "index_head_dim": 12,
    "index_n_heads": 32,
    "pad_token_id": None,
}
"""Sparse attention that reads a part of a text of a few dozen tokens. All scores would be 0 for a
padding token, which has no embedding, and of equal scores transformers takes any"""
COMPRESSED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "layer_types": [
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe"],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "num_attention_heads": 4,
    "head_dim": 24,
    "partial_rotary_factor": 1 / 3,
    "q_lora_rank": 32,
    "sliding_window": 9,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 32,
    "index_head_dim": 12,
    "index_topk": 5,
    "hc_mult": 3,
    "hc_sinkhorn_iters": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "swiglu_limit": 0.8,
    "compress_rope_theta": 900.0,
    "rope_theta": 500.0,
}
"""Entries of a text of a few dozen tokens, more than an indexer chooses, and blocks that end within
one of 12 tokens"""
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 2,
}
MAMBA2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "initializer_range": 0.2,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
}
MAMBA1: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "initializer_range": 0.2,
    "state_size": 16,
}
ZAMBA2: dict[str, Any] = SHAPE | {
    "num_hidden_layers": 6,
    "layers_block_type": [
        *("linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention", "hybrid")
    ],
    "initializer_range": 0.1,
    "adapter_rank": 32,
    "mamba_d_state": 16,
    "mamba_ngroups": 2,
    "n_mamba_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": True,
}
MULTIPLIERS: dict[str, Any] = {
    "attention_in_multiplier": 0.9,
    "attention_out_multiplier": 0.7,
    "embedding_multiplier": 3.0,
    "key_multiplier": 0.8,
    "lm_head_multiplier": 0.5,
    "mlp_multipliers": [0.8, 1.1],
    "ssm_in_multiplier": 1.2,
    "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
    "ssm_out_multiplier": 0.6,
}
NEMOTRON_H: dict[str, Any] = {
    "head_dim": 24,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.5,
}
GEMMA4: dict[str, Any] = SHAPE | {
    "initializer_range": 0.1,
    "num_hidden_layers": 7,
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2
    + ["sliding_attention", "sliding_attention", "full_attention"],
    "tie_word_embeddings": True,
}
GEMMA3N: dict[str, Any] = {key: SHAPE[key] for key in SHAPE if key != "intermediate_size"} | {
    "num_hidden_layers": 5,
    "head_dim": 16,
    "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY - 9,
    "laurel_rank": 12,
    "tie_word_embeddings": True,
}
_VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 64,
    "intermediate_size": 8,
    "num_heads": 1,
    "out_hidden_size": 64,
}

MINIMAX_M3: dict[str, Any] = WIDE | {
    "intermediate_size": 32,
    "dense_intermediate_size": 96,
    "shared_intermediate_size": 64,
    "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "rotary_dim": 16,
    "rope_parameters": _PLAIN | {"partial_rotary_factor": 0.5},
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.8,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "pad_token_id": None,
}
GPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 3,
    "n_positions": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FALCON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE),
    "llama, tied": LlamaConfig(**SHAPE | {"tie_word_embeddings": True}),
    "llama, biases": LlamaConfig(**SHAPE, attention_bias=True, mlp_bias=True),
    "llama, multi-head attention": LlamaConfig(**SHAPE | {"num_key_value_heads": 4}),
    "llama, wide heads": LlamaConfig(**SHAPE, head_dim=32),
    "llama, llama3 rope": LlamaConfig(**SHAPE, rope_parameters=_LLAMA3),
    "llama, linear rope": LlamaConfig(**SHAPE, rope_parameters=_LINEAR),
    "llama, dynamic rope": LlamaConfig(**SHAPE, rope_parameters=_DYNAMIC),
    "llama, yarn rope": LlamaConfig(**SHAPE, rope_parameters=_YARN),
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
    "recurrent gemma": RecurrentGemmaConfig(  # widths of the tiled kernels
        **{key: SHAPE[key] for key in SHAPE if key != "initializer_range"}
        | {"num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
        | {"tie_word_embeddings": True, "intermediate_size": 192},
        attention_window_size=9,
        w_init_variance_scale=1.0,
    ),
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
    "gemma3, with images": Gemma3Config(  # type: ignore[call-arg]
        text_config=Gemma3TextConfig(**WIDE | {"tie_word_embeddings": True}, sliding_window=9),
        vision_config=_VISION,
        mm_tokens_per_image=1,
        image_token_index=90,
        boi_token_index=91,
        eoi_token_index=92,
        eos_token_id=[1, 7],
        architectures=["Gemma3ForConditionalGeneration"],
    ),
    "llava, llama": LlavaConfig(text_config=LlamaConfig(**SHAPE), vision_config=_VISION),
    "llava, mistral": LlavaConfig(
        text_config=MistralConfig(**SHAPE, sliding_window=11), vision_config=_VISION
    ),
    "llava, qwen2": LlavaConfig(text_config=Qwen2Config(**SHAPE), vision_config=_VISION),
    "mistral3": Mistral3Config(
        text_config=MistralConfig(**SHAPE, sliding_window=None),
        vision_config=_VISION,
        tie_word_embeddings=False,
    ),
    "idefics3": Idefics3Config(text_config=LlamaConfig(**SHAPE), vision_config=_VISION),
    "smolvlm, tied": SmolVLMConfig(
        text_config=LlamaConfig(**SHAPE | {"tie_word_embeddings": True}),
        vision_config=_VISION,
        tie_word_embeddings=True,
    ),
    "qwen2 vl": Qwen2VLConfig(
        text_config=Qwen2VLTextConfig(**SHAPE, rope_parameters=_MROPE),
        vision_config={"depth": 1, "embed_dim": 8, "hidden_size": 64, "num_heads": 1},
    ),
    "qwen2.5 vl, tied": Qwen2_5_VLConfig(
        text_config=Qwen2_5_VLTextConfig(**SHAPE, rope_parameters=_MROPE),
        vision_config=_QWEN_VISION,
        tie_word_embeddings=True,
    ),
    "qwen3 vl": Qwen3VLConfig(
        text_config=Qwen3VLTextConfig(
            **WIDE, rope_parameters=_MROPE | {"mrope_section": [8, 4, 4]}
        ),
        vision_config=_QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3 vl moe": Qwen3VLMoeConfig(
        text_config=Qwen3VLMoeTextConfig(
            **WIDE,
            **EXPERTS,
            decoder_sparse_step=2,
            rope_parameters=_MROPE | {"mrope_section": [8, 4, 4]},
        ),
        vision_config=_QWEN_VISION | {"deepstack_visual_indexes": [0]},
    ),
    "qwen3.5 vl": Qwen3_5Config(
        text_config=Qwen3_5TextConfig(
            **SHAPE | DELTA_NET, rope_parameters=_MROPE | {"mrope_section": [2, 1, 1]}
        ),
        vision_config=_QWEN_VISION,
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
        **SHAPE, original_max_position_embeddings=32, rope_parameters=_LONGROPE
    ),
    "phi3, short": Phi3Config(
        **SHAPE, original_max_position_embeddings=256, rope_parameters=_LONGROPE
    ),
    "olmo2": Olmo2Config(**SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "olmo3": Olmo3Config(
        **SHAPE,
        sliding_window=9,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": _YARN, "sliding_attention": _PLAIN},
    ),
    "olmo hybrid": OlmoHybridConfig(**OLMO_HYBRID),
    "olmo hybrid, no rope": OlmoHybridConfig(
        **OLMO_HYBRID | {"num_attention_heads": 2, "num_key_value_heads": 1},
        linear_allow_neg_eigval=False,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "glm": GlmConfig(**SHAPE, head_dim=24),
    "glm4": Glm4Config(**WIDE, partial_rotary_factor=0.25),  # type: ignore[call-arg]
    "cohere": CohereConfig(**SHAPE | {"tie_word_embeddings": True}, logit_scale=0.5),
    "cohere, norms": CohereConfig(
        **SHAPE | {"num_attention_heads": 2}, attention_bias=True, use_qk_norm=True
    ),
    "cohere2": Cohere2Config(  # type: ignore[call-arg]
        **SHAPE, sliding_window=9, sliding_window_pattern=2, rope_parameters=_PLAIN
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
        **WIDE, rope_parameters=_PLAIN | {"rope_type": "dynamic", "alpha": 100.0, "factor": 1.0}
    ),
    "apertus": ApertusConfig(**SHAPE | {"num_attention_heads": 2}),
    "cwm": CwmConfig(
        **SHAPE | {"num_hidden_layers": 5}, head_dim=16, sliding_window=9, rope_parameters=_LLAMA3
    ),
    "jais2": Jais2Config(**WIDE),
    "ernie": Ernie4_5Config(**SHAPE, head_dim=24, use_bias=True),
    "ministral3": Ministral3Config(
        **SHAPE,
        head_dim=24,
        sliding_window=30,
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 0.5, "llama_4_scaling_beta": 0.4},
    ),
    "mistral3, ministral3": Mistral3Config(
        text_config=Ministral3Config(
            **SHAPE, head_dim=16, rope_parameters=_YARN | {"llama_4_scaling_beta": 0.4}
        ),
        vision_config=_VISION,
        tie_word_embeddings=False,
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
    "qwen3 next": Qwen3NextConfig(
        **SHAPE | DELTA_NET,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
    ),
    "qwen3.5": Qwen3_5TextConfig(**SHAPE | DELTA_NET | {"tie_word_embeddings": True}),
    "qwen3.5 moe": Qwen3_5MoeTextConfig(  # no layer is dense, so the file has no width of one
        **{key: value for key, value in SHAPE.items() if key != "intermediate_size"} | DELTA_NET,
        num_experts=5,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "deepseek v2": DeepseekV2Config(
        **LATENT | ROUTED | {"q_lora_rank": None},
        rope_parameters=_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
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
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
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
        rope_parameters=_YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
    ),
    "glm moe dsa": GlmMoeDsaConfig(
        **LATENT
        | ROUTED
        | INDEXED
        | {"num_hidden_layers": 4, "q_lora_rank": 32, "v_head_dim": 24, "index_head_dim": 8},
        first_k_dense_replace=1,
        indexer_types=["full", "full", "shared", "shared"],
    ),
    "deepseek v4": DeepseekV4Config(**COMPRESSED, rope_parameters=dict(_YARN)),
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
        rope_parameters=_LLAMA3,
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
    "hy v3": HYV3Config(
        **WIDE | {"num_shared_experts": 2},
        **EXPERTS,
        attention_bias=True,
        mlp_bias=True,
    ),
    "kimi linear": KimiLinearConfig(
        **LATENT | {"initializer_range": 0.12, "q_lora_rank": None, "num_hidden_layers": 4},
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_head_dim=16,
        linear_num_heads=4,
        num_local_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_group=4,
        topk_group=2,
    ),
    "bailing hybrid": BailingHybridConfig(
        **LATENT
        | {"initializer_range": 0.1, "q_lora_rank": None, "num_hidden_layers": 4, "head_dim": 16},
        layer_group_size=2,
        first_k_dense_replace=1,
        num_local_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        n_group=4,
        topk_group=2,
    ),
    "bailing hybrid, unbounded": BailingHybridConfig(
        **LATENT | {"initializer_range": 0.1, "num_hidden_layers": 3, "head_dim": 16},
        layer_group_size=3,
        first_k_dense_replace=3,
        kda_safe_gate=False,
    ),
    "lara mini": LaraMiniConfig(
        **{key: value for key, value in WIDE.items() if key != "intermediate_size"}
        | {"initializer_range": 0.1},
        **EXPERTS,
        layer_types=["linear_attention", "sliding_attention", "full_attention"],
        shared_expert_intermediate_size=40,
        sliding_window=9,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "lfm2": Lfm2Config(  # heads of the tiled kernels
        **SHAPE | {"num_attention_heads": 2, "num_key_value_heads": 1},
        layer_types=["conv", "full_attention", "conv"],
        block_auto_adjust_ff_dim=False,
    ),
    "lfm3": Lfm3Config(  # heads of the tiled kernels
        **WIDE | {"num_hidden_layers": 5, "num_attention_heads": 2, "num_key_value_heads": 1},
        layer_types=[*("conv", "sliding_attention", "full_attention", "conv", "sliding_attention")],
        sliding_window=9,
    ),
    "lfm2, biases": Lfm2Config(
        **SHAPE | {"tie_word_embeddings": True},
        full_attn_idxs=[1],
        conv_bias=True,
        conv_L_cache=4,
        block_multiple_of=24,
        block_ffn_dim_multiplier=1.2,
    ),
    "lfm2 moe": Lfm2MoeConfig(
        **SHAPE | EXPERTS,
        layer_types=["conv", "full_attention", "conv"],
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
    "granite hybrid": GraniteMoeHybridConfig(
        **SHAPE | MAMBA,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        shared_intermediate_size=40,
        num_local_experts=5,
        num_experts_per_tok=2,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.2,
        logits_scaling=5.0,
    ),
    "granite hybrid, dense": GraniteMoeHybridConfig(
        **SHAPE | MAMBA | {"mamba_n_groups": 1, "tie_word_embeddings": True},
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        shared_intermediate_size=72,
        num_local_experts=0,
        position_embedding_type="rope",
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        time_step_limit=(0.1, 2.0),
    ),
    "bamba": BambaConfig(  # heads of the tiled kernels
        **SHAPE | MAMBA | {"num_attention_heads": 2}, attn_layer_indices=[1]
    ),
    "nemotron h": NemotronHConfig(
        **{key: value for key, value in SHAPE.items() if key != "num_hidden_layers"},
        **NEMOTRON_H,
        layers_block_type=[
            *("linear_attention", "mlp", "linear_attention", "full_attention", "moe"),
            *("linear_attention", "moe"),
        ],
        n_group=4,
        topk_group=2,
        mlp_bias=True,
        use_bias=True,
    ),
    "falcon h1": FalconH1Config(**SHAPE | MAMBA, mamba_d_ssm=128, **MULTIPLIERS),
    "falcon h1, norms": FalconH1Config(
        **SHAPE | MAMBA,
        mamba_d_ssm=None,
        mamba_rms_norm=True,
        mamba_norm_before_gate=True,
        attention_bias=True,
        mlp_bias=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        **MULTIPLIERS,
    ),
    "falcon h1, gated norms": FalconH1Config(
        **SHAPE | MAMBA, mamba_d_ssm=128, mamba_rms_norm=True, mamba_norm_before_gate=False
    ),
    "mamba2": Mamba2Config(**MAMBA2, time_step_limit=(0.1, 2.0)),
    "mamba2, biases": Mamba2Config(**MAMBA2, use_bias=True, use_conv_bias=False),
    "mamba": MambaConfig(**MAMBA1, time_step_rank=32),  # widths of the tiled kernels
    "falcon mamba": FalconMambaConfig(
        **MAMBA1 | {"tie_word_embeddings": False},
        time_step_rank=8,
        use_bias=True,
        use_conv_bias=False,
        mixer_rms_eps=1e-3,
    ),
    "jamba": JambaConfig(
        **SHAPE | {"num_hidden_layers": 4, "initializer_range": 0.1},
        num_experts=5,
        attn_layer_period=3,
        attn_layer_offset=1,
        mamba_dt_rank=8,
        mamba_proj_bias=True,
    ),
    "zamba": ZambaConfig(  # widths of the tiled kernels
        **SHAPE | {"num_hidden_layers": 6, "initializer_range": 0.1, "tie_word_embeddings": True},
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_dt_rank=32,
        mamba_proj_bias=True,
    ),
    "zamba2": Zamba2Config(**ZAMBA2),  # widths of the tiled kernels
    "zamba2, shared twice": Zamba2Config(
        **ZAMBA2, num_mem_blocks=2, use_shared_attention_adapter=True
    ),
    "zamba2, adapters": Zamba2Config(
        **ZAMBA2 | {"tie_word_embeddings": False},
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        add_bias_linear=True,
        time_step_min=0.1,
        rms_norm_eps=1e-3,
    ),
    "minimax": MiniMaxConfig(  # heads of the tiled kernels
        **SHAPE | {"num_hidden_layers": 4, "num_attention_heads": 2},
        num_local_experts=5,
        linear_attn_alpha_factor=1.3,
        full_attn_alpha_factor=0.8,
        mlp_alpha_factor=1.1,
        linear_attn_beta_factor=0.7,
        full_attn_beta_factor=0.7,
        mlp_beta_factor=0.7,
        block_size=16,
    ),
    "minimax m3": MiniMaxM3VLTextConfig(  # widths of the tiled kernels
        **MINIMAX_M3, index_topk_blocks=2, index_block_size=7
    ),
    "minimax m3, with images": MiniMaxM3VLConfig(
        text_config=MiniMaxM3VLTextConfig(
            **MINIMAX_M3, index_topk_blocks=3, index_block_size=4, index_local_blocks=2
        ),
        vision_config=_VISION,
    ),
    "mistral4": Mistral4Config(
        **LATENT | ROUTED,
        rope_parameters=_YARN | {"mscale": 0.8, "mscale_all_dim": 0.8, "llama_4_scaling_beta": 0.4},
    ),
    "mistral4, groups": Mistral4Config(
        **LATENT | ROUTED | {"first_k_dense_replace": 1}, n_group=4, topk_group=2
    ),
    "youtu": YoutuConfig(**LATENT, rope_interleave=False),
    "minicpm3": MiniCPM3Config(**LATENT, scale_emb=3, dim_model_base=40),
    "gpt-oss": GptOssConfig(
        **WIDE,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=9,
        rope_parameters=_YARN | {"truncate": False},
        swiglu_limit=0.8,
    ),
    "qwen3": Qwen3Config(**SHAPE, head_dim=32),
    "qwen3, tied": Qwen3Config(**SHAPE | {"tie_word_embeddings": True}, head_dim=32),
}


_WITH_OFFSETS = (
    RecurrentGemmaConfig,
    GemmaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma3Config,
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    Qwen3NextConfig,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3_5MoeTextConfig,
    NemotronConfig,
)
"""Families that store norms minus one"""


_PUBLISHED = {
    "kimi_linear": (r"block_sparse_moe\.(?=(gate|up|down)_proj)", "mlp."),
    "olmo_hybrid": (r"(\.[13]\.)feedforward_layer_norm", r"\1post_attention_layernorm"),
}
"""Patterns of names that transformers writes, and the names in published files"""


def make_checkpoint(
    directory: Path, config: PreTrainedConfig, *, shard: str = "1GB"
) -> PreTrainedModel:
    """Save a model with random weights, norms and biases; return it as the reference."""
    torch.manual_seed(3)
    model = _new_model(config)
    is_offset = isinstance(config, _WITH_OFFSETS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5).sub_(1 if is_offset else 0)
            elif not parameter.any():  # Gemma 3's projector
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "std_scale", "std_bias")):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.uniform_(0, 0.5)
            elif name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), 8).argsort(dim=1)[:, : buffer.shape[1]])
            elif name.endswith(("put_min", "put_max")):  # bounds of Gemma 4's clipped products
                buffer.fill_(-2 if name.endswith("min") else 2)
    model.eval().save_pretrained(directory, max_shard_size=shard)  # type: ignore[no-untyped-call]
    if (names := _PUBLISHED.get(config.model_type)) is not None:
        file = directory / "model.safetensors"
        tensors = load_file(file)
        save_file({re.sub(*names, name): tensors[name] for name in tensors}, file)
    return model


def _new_model(config: PreTrainedConfig) -> PreTrainedModel:
    if isinstance(config, Mistral4Config):  # transformers counts it among vision-language models
        config._attn_implementation = "eager"
        return Mistral4ForCausalLM(config)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    return model


def make_packed_checkpoint(
    directory: Path, config: PreTrainedConfig = CONFIGS["gpt-oss"]
) -> PreTrainedModel:
    """Save gpt-oss with MXFP4 experts; return the reference, decoded by transformers."""
    model = make_checkpoint(directory, config)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(5)
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, groups, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        parameters[name].data.copy_(numbers)
    save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    return model


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return transformers' logits [len(tokens), vocabulary]."""
    logits: Tensor = model(tokens[None]).logits[0]
    return logits


class Driver:
    """Feeder of sequences to a decoder, in chunks, with KV blocks in random order."""

    def __init__(
        self,
        decoder: Model,
        sequences: Sequence[Tensor],
        block_size: int = 32,
        *,
        in_pieces: bool = False,
        adapters: Sequence[int] = (),
    ) -> None:
        """in_pieces: run steps in padded pieces, as on a GPU; adapters: one for each sequence."""
        self._adapters = adapters
        self._decoder = decoder
        self._sequences = sequences
        self._size = block_size
        needed = [-(-len(tokens) // block_size) for tokens in sequences]
        generator = torch.Generator().manual_seed(11)
        shuffled = torch.randperm(sum(needed) + 3, generator=generator).to(torch.int32)
        self._tables = torch.zeros(len(sequences), max(needed), dtype=torch.int32)
        for index, count in enumerate(needed):
            first = sum(needed[:index])
            self._tables[index, :count] = shuffled[first : first + count]
        runs = sum(len(tokens) for tokens in sequences)  # each writes a slot of its own
        blocks = len(shuffled) + 1  # the last one is spare
        self.cache = decoder.allocate_cache(blocks, block_size, runs)
        self._free_slots = list(range(runs))
        self._snapshots: list[dict[int, int]] = [{} for _ in sequences]
        """By sequence, the slot of the states behind some numbers of its tokens"""
        self._pieces = PieceGraphs(decoder, self.cache, 1024) if in_pieces else None
        self._done = [0] * len(sequences)
        self.logits = [torch.empty(0, decoder.spec.vocab_size) for _ in sequences]
        """Logits so far, [tokens, vocabulary] for each sequence; NaN: not computed"""

    def blocks_of(self, sequence: int) -> set[int]:
        """Return the blocks that hold a sequence's tokens so far."""
        count = -(-self._done[sequence] // self._size)
        return set(self._tables[sequence, :count].tolist())

    def share(self, sequence: int, other: int, tokens: int) -> None:
        """Let `sequence` reuse the blocks of `tokens` first tokens that it shares with `other`."""
        blocks = tokens // self._size
        self._tables[sequence, :blocks] = self._tables[other, :blocks]
        self._done[sequence] = blocks * self._size
        self._snapshots[sequence] = dict(self._snapshots[other])
        self.logits[sequence] = self.logits[other][: self._done[sequence]]

    def step(self, chunks: Sequence[tuple[int, int]], kept: Sequence[int] | None = None) -> None:
        """Run a batch of (sequence, number of next tokens), decodes first.

        kept: number of each chunk's last tokens whose logits are computed; None: all.
        """
        batch = self.batch(chunks)
        counts = batch.query_lengths_host
        if kept is not None:
            batch, counts = replace(batch, output_rows=keep_last(counts, kept)), tuple(kept)
        if self._pieces is not None:
            hidden = self._pieces.run(batch)
        else:
            hidden = self._decoder.forward(batch, self.cache)
        logits = torch.split(self._decoder.logits(hidden), list(counts))
        for (index, count), rows in zip(chunks, logits, strict=True):
            self._done[index] += count
            unknown = torch.full((count - len(rows), rows.shape[1]), torch.nan)
            self.logits[index] = torch.cat((self.logits[index], unknown, rows))

    def batch(self, chunks: Sequence[tuple[int, int]]) -> StepBatch:
        spans = [(i, self._done[i], self._done[i] + count) for i, count in chunks]
        positions = torch.cat([torch.arange(start, end) for _, start, end in spans])
        lengths = torch.tensor([count for _, count in chunks])
        rows = torch.tensor([index for index, _ in chunks])
        contexts = [end for _, _, end in spans]
        tables = self._tables[rows, : -(-max(contexts) // self._size)]
        owners = torch.repeat_interleave(torch.arange(len(chunks)), lengths)
        blocks = tables[owners, positions // self._size].long()
        return StepBatch(
            token_ids=torch.cat([self._sequences[i][start:end] for i, start, end in spans]),
            positions=positions,
            slots=blocks * self._size + positions % self._size,
            query_starts=torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32),
            context_lengths=torch.tensor(contexts, dtype=torch.int32),
            block_tables=tables,
            num_decodes=_leading_ones(lengths.tolist()),
            query_lengths_host=tuple(lengths.tolist()),
            context_lengths_host=tuple(contexts),
            adapters_host=tuple(self._adapters[i] for i, _ in chunks) if self._adapters else (),
            states=self._runs(spans) if self.cache.states else None,
        )

    def _runs(self, spans: Sequence[tuple[int, int, int]]) -> StateSegments:
        """Return the runs of sequences' tokens, which are cut at the ends of blocks."""
        lengths, sources, targets = [], [], []
        for sequence, start, end in spans:
            snapshots, place = self._snapshots[sequence], start
            while place < end:
                sources.append(snapshots.get(place, -1) if place else -1)
                upto = min(end, (place // self._size + 1) * self._size)
                snapshots[upto] = self._free_slots.pop()
                targets.append(snapshots[upto])
                lengths.append(upto - place)
                place = upto
        starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        read, written = (torch.tensor(each, dtype=torch.int32) for each in (sources, targets))
        return StateSegments(starts, read, written, tuple(lengths))


def keep_last(lengths: Sequence[int], kept: Sequence[int]) -> OutputRows:
    """Return the last `kept` rows of sequences of these lengths."""
    ends = torch.tensor(lengths).cumsum(0).tolist()
    rows = [torch.arange(end - count, end) for end, count in zip(ends, kept, strict=True)]
    starts = torch.tensor([0, *kept]).cumsum(0).to(torch.int32)
    return OutputRows(torch.cat(rows), starts, tuple(kept))


def _leading_ones(lengths: list[int]) -> int:
    return next((i for i, length in enumerate(lengths) if length != 1), len(lengths))


def random_tokens(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (count,), generator=generator)
