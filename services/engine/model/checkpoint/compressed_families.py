"""Decoders with compressed attention: a row for each architecture."""

from dataclasses import replace

from services.engine.model.checkpoint.compressed_names import CompressedNames, HyperNames
from services.engine.model.checkpoint.expert_names import ExpertTensorNames
from services.engine.model.checkpoint.family import Family, TensorNames

__all__ = ["COMPRESSED_FAMILIES"]

_PUBLISHED = TensorNames(
    roots={"": "head"},
    embedding="embed",
    attention_norm="attn_norm",
    feed_forward_norm="ffn_norm",
    experts=ExpertTensorNames(
        router="ffn.gate",
        gate=("ffn.experts.{}.w1", "ffn.experts.{}.w3"),
        down="ffn.experts.{}.w2",
        shared_gate=("ffn.shared_experts.w1", "ffn.shared_experts.w3"),
        shared_down="ffn.shared_experts.w2",
        choice_bias="ffn.gate.bias",
        choice_bias_is_row=False,
        by_token="ffn.gate.tid2eid",
    ),
    compressed=CompressedNames(),
    hyper=HyperNames(),
    ignored=("mtp.*",),
)
_SAVED = replace(
    _PUBLISHED,
    roots={"model.": "head"},
    embedding="embed_tokens",
    compressed=CompressedNames(key_norm="attn.norm"),
    hyper=HyperNames(head="hc_head.hc"),
)
"""Names in files that transformers writes"""

COMPRESSED_FAMILIES: tuple[Family, ...] = (
    Family(
        "DeepseekV4ForCausalLM",
        names=_PUBLISHED,
        other_names=_SAVED,
        keys={
            "intermediate_size": "moe_intermediate_size",
            "moe_num_shared_experts": "n_shared_experts",
            "num_local_experts": "n_routed_experts",
        },
        defaults={
            "compress_rope_theta": 160000.0,
            "hc_eps": 1e-6,
            "hc_mult": 4,
            "hc_sinkhorn_iters": 20,
            "head_dim": 512,
            "index_head_dim": 128,
            "index_n_heads": 64,
            "index_topk": 512,
            "max_position_embeddings": 1 << 20,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 6,
            "num_key_value_heads": 1,
            "num_nextn_predict_layers": 1,
            "o_groups": 8,
            "o_lora_rank": 1024,
            "q_lora_rank": 1024,
            "rope_theta": 10000.0,
            "routed_scaling_factor": 1.5,
            "scoring_func": "sqrtsoftplus",
            "sliding_window": 128,
            "swiglu_limit": 10.0,
        },
        refused=("attention_bias", "mlp_bias"),
        required=("norm_topk_prob",),
        clamped_silu=True,
        scorings=("sqrtsoftplus", "sigmoid"),
        routes_by_token=True,
    ),
)
