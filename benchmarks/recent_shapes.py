"""Shapes of recent models, some with fewer layers or experts so that a test machine holds them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from transformers import (
    DeepseekV2Config,
    Gemma4TextConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    MiniMaxM2Config,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
)

__all__ = ["RECENT", "RECENT_CONTEXT", "RECENT_TOKENS"]

RECENT_CONTEXT = 32_768
RECENT_TOKENS = 32_000
"""Tokens of their tokenizer; an embedding may have more rows"""

_QWEN: dict[str, Any] = {"vocab_size": 248_320, "head_dim": 256, "num_key_value_heads": 2}
_NAMED_IN_FILES: dict[str, Any] = {"rotary_dim": 64, "scoring_func": "sigmoid"}
"""Values of MiniMax M2 that transformers does not read, and llama.cpp does"""


def _kinds(layers: int, other: str, attention: tuple[int, ...]) -> list[str]:
    """Return the kind of each layer, of which `attention` have full attention."""
    return ["full_attention" if layer in attention else other for layer in range(layers)]


RECENT: dict[str, Callable[..., PreTrainedConfig]] = {
    # Qwen 3.5 0.8B
    "bench-qwen3.5": partial(
        Qwen3_5TextConfig,
        **_QWEN,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=8,
        intermediate_size=3584,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    ),
    # Qwen 3.5 35B-A3B with 12 of 40 layers and 64 of 256 experts
    "bench-qwen3.5-moe": partial(
        Qwen3_5MoeTextConfig,
        **_QWEN,
        hidden_size=2048,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        tie_word_embeddings=False,
    ),
    # Gemma 4 26B-A4B with 6 of 30 layers and 16 of 128 experts
    "bench-gemma4-moe": partial(  # type: ignore[call-arg]
        Gemma4TextConfig,
        vocab_size=RECENT_TOKENS,
        vocab_size_per_layer_input=RECENT_TOKENS,
        hidden_size=2816,
        num_hidden_layers=6,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        global_head_dim=512,
        attention_k_eq_v=True,
        sliding_window=1024,
        hidden_size_per_layer_input=0,
        intermediate_size=2112,
        enable_moe_block=True,
        num_experts=16,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    # gpt-oss 20B with 4 of 24 layers, its experts in MXFP4
    "bench-gpt-oss": partial(
        GptOssConfig,
        vocab_size=RECENT_TOKENS,
        num_hidden_layers=4,
        num_local_experts=32,
        rope_parameters={"rope_type": "default", "rope_theta": 150_000.0},
    ),
    # DeepSeek V2 Lite with 5 of 27 layers, and V2's low rank of queries, without which llama.cpp
    # takes 27 layers alone
    "bench-deepseek-v2": partial(
        DeepseekV2Config,
        vocab_size=102_400,
        hidden_size=2048,
        intermediate_size=10_944,
        moe_intermediate_size=1408,
        num_hidden_layers=5,
        num_attention_heads=16,
        num_key_value_heads=16,
        first_k_dense_replace=1,
        n_routed_experts=64,
        n_shared_experts=2,
        num_experts_per_tok=6,
        n_group=1,
        topk_group=1,
        q_lora_rank=1536,
    ),
    # LFM2 1.2B
    "bench-lfm2": partial(
        Lfm2Config,
        vocab_size=65_536,
        hidden_size=2048,
        num_hidden_layers=16,
        layer_types=_kinds(16, "conv", (2, 5, 8, 10, 12, 14)),
        tie_word_embeddings=True,
    ),
    # Granite 4.0 H 1B
    "bench-granite-4-h": partial(
        GraniteMoeHybridConfig,
        vocab_size=100_352,
        hidden_size=1536,
        num_hidden_layers=40,
        layer_types=_kinds(40, "linear_attention", (5, 15, 25, 35)),
        num_attention_heads=12,
        num_key_value_heads=4,
        num_local_experts=0,
        num_experts_per_tok=0,
        intermediate_size=4096,
        shared_intermediate_size=4096,
        mamba_n_heads=48,
        mamba_d_state=128,
        embedding_multiplier=12.0,
        logits_scaling=6.0,
        residual_multiplier=0.22,
        attention_multiplier=1 / 128,
        tie_word_embeddings=True,
    ),
    # MiniMax M2 with 2 of 62 layers and 64 of 256 experts
    "bench-minimax-m2": partial(
        MiniMaxM2Config,
        vocab_size=RECENT_TOKENS,
        num_hidden_layers=2,
        num_local_experts=64,
        **_NAMED_IN_FILES,
    ),
}
"""Models of `benchmarks.checkpoints` that are made only if they are named"""
