"""Decoders with addends of attention's scores by distance: a row for each architecture."""

from services.engine.model.checkpoint.attention_names import RelativeNames
from services.engine.model.checkpoint.expert_names import ExpertStack, ExpertTensorNames
from services.engine.model.checkpoint.family import Family, TensorNames

__all__ = ["PUBLISHED_INKLING", "RELATIVE_FAMILIES"]

RELATIVE_FAMILIES: tuple[Family, ...] = (
    Family(
        "InklingForCausalLM",
        names=TensorNames(
            embedding_norm="embed_tokens.embed_norm",
            relative=RelativeNames(),
            experts=ExpertTensorNames(
                router="mlp.gate",
                gate=("mlp.experts.gate_up_proj",),
                down="mlp.experts.down_proj",
                shared_stack=(
                    "mlp.shared_experts.gate_proj",
                    "mlp.shared_experts.up_proj",
                    "mlp.shared_experts.down_proj",
                ),
                choice_bias="mlp.gate.e_score_correction_bias",
                choice_bias_is_row=False,
            ),
        ),
        keys={
            "conv_kernel_size": "sconv_kernel_size",
            "max_position_embeddings": "model_max_length",
            "moe_num_shared_experts": "n_shared_experts",
            "num_local_experts": "n_routed_experts",
            "routed_scaling_factor": "route_scale",
            "sliding_window": "sliding_window_size",
        },
        defaults={
            "hidden_size": 6144,
            "intermediate_size": 24576,
            "moe_intermediate_size": 3072,
            "n_routed_experts": 256,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "num_attention_heads": 64,
            "num_experts_per_tok": 6,
            "num_hidden_layers": 66,
            "num_key_value_heads": 8,
            "route_scale": 8.0,
            "swa_num_attention_heads": 64,
            "swa_num_key_value_heads": 16,
            "vocab_size": 201024,
        },
        required=("shared_expert_sink",),
        reads_logit_scale=True,
        scores_by_sigmoid=True,
    ),
)

PUBLISHED_INKLING = TensorNames(
    embedding="embed",
    embedding_norm="embed_norm",
    attention_norm="attn_norm",
    qkv=("attn.wq_du", "attn.wk_dv", "attn.wv_dv"),
    query_norm="attn.q_norm",
    key_norm="attn.k_norm",
    output="attn.wo_ud",
    feed_forward_norm="mlp_norm",
    gate=("mlp.w13_dn",),
    gate_alternates=True,
    down="mlp.w2_md",
    relative=RelativeNames(
        states="attn.wr_du",
        table="attn.rel_logits_proj.proj",
        keys="attn.k_sconv",
        values="attn.v_sconv",
        output="attn_sconv",
        feed_forward="mlp_sconv",
    ),
    experts=ExpertTensorNames(
        router="mlp.gate",
        gate=("mlp.experts.w13_weight",),
        down="mlp.experts.w2_weight",
        stack=ExpertStack(alternates=True),
        shared_stack=(
            "mlp.shared_experts.shared_w13_weight",
            "mlp.shared_experts.shared_w2_weight",
        ),
        choice_bias="mlp.gate.bias",
        choice_bias_is_row=False,
    ),
)
"""Names in the files of Thinking Machines"""
