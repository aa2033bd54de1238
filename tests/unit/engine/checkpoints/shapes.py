"""Sizes of small models, and keys that several of them have."""

from typing import Any

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
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5],
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0],
    "partial_rotary_factor": 0.75,
}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [4, 2, 2]}
BLOOM: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "n_layer": 3,
    "seq_length": 256,
    "initializer_range": 0.2,
}
MPT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "n_layers": 3,
    "max_seq_len": 256,
    "initializer_range": 0.2,
}
DBRX: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "n_layers": 3,
    "max_seq_len": 256,
    "initializer_range": 0.2,
    "rope_parameters": PLAIN,
}
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
LONGCAT: dict[str, Any] = {
    key: value
    for key, value in LATENT.items()
    if key not in ("intermediate_size", "num_hidden_layers")
} | {
    "num_layers": 2,
    "head_dim": 8,
    "ffn_hidden_size": 96,
    "expert_ffn_hidden_size": 24,
    "n_routed_experts": 5,
    "zero_expert_num": 3,
    "moe_topk": 3,
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
VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 28,
    "patch_size": 14,
}
GLM_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 1,
    "out_hidden_size": 64,
    "image_size": 28,
}
QWEN_VISION: dict[str, Any] = {
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
    "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5},
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.8,
    "index_n_heads": 2,
    "index_head_dim": 32,
    "pad_token_id": None,
}
COHERE2_MOE: dict[str, Any] = WIDE | {
    "num_hidden_layers": 6,
    "intermediate_size": 32,
    "num_experts": 5,
    "sliding_window": 9,
    "logit_scale": 0.5,
    "tie_word_embeddings": True,
}
LAGUNA: dict[str, Any] = WIDE | {
    "num_hidden_layers": 4,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
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
INKLING: dict[str, Any] = WIDE | {
    "initializer_range": 0.1,
    "swa_num_attention_heads": 2,
    "swa_num_key_value_heads": 1,
    "swa_head_dim": 32,
    "sliding_window_size": 9,
    "rel_extent": 24,
    "d_rel": 16,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "route_scale": 2.5,
    "logits_mup_width_multiplier": 2.0,
}
