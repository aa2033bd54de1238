"""Decoders with gated delta nets: a row for each architecture."""

from dataclasses import replace

from services.engine.model.checkpoint.config import JsonObject
from services.engine.model.checkpoint.family import (
    DeltaNetNames,
    Family,
    LatentNames,
    QkNorm,
    TensorNames,
)
from services.engine.model.checkpoint.shared_names import (
    LATENT_WIDTHS,
    MIXTRAL_EXPERTS,
    OLMO2,
    QWEN_EXPERTS,
)

__all__ = ["DELTA_FAMILIES"]

_QWEN_HYBRID: JsonObject = {
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "partial_rotary_factor": 0.25,
}

DELTA_FAMILIES: tuple[Family, ...] = (
    Family(
        "OlmoHybridForCausalLM",
        names=replace(
            OLMO2,
            delta_net=DeltaNetNames(
                inputs=(
                    "linear_attn.q_proj",
                    "linear_attn.k_proj",
                    "linear_attn.v_proj",
                    "linear_attn.g_proj",
                ),
                rates=("linear_attn.b_proj", "linear_attn.a_proj"),
                convolution=(
                    "linear_attn.q_conv1d.weight",
                    "linear_attn.k_conv1d.weight",
                    "linear_attn.v_conv1d.weight",
                ),
                norm="linear_attn.o_norm.weight",
                output="linear_attn.o_proj",
                norms=("attention_layer_norm", "feedforward_layer_norm"),
            ),
        ),
        defaults={
            "full_attention_interval": 4,
            "linear_allow_neg_eigval": True,
            "linear_conv_kernel_dim": 4,
            "linear_norm_eps": 1e-5,
        },
        reads_attention_bias=True,
        qk_norm=QkNorm.ALL_HEADS,
        rotates_with_base=True,
    ),
    Family(
        "Qwen3NextForCausalLM",
        names=TensorNames(
            experts=QWEN_EXPERTS,
            delta_net=DeltaNetNames(
                inputs=("linear_attn.in_proj_qkvz",), rates=("linear_attn.in_proj_ba",)
            ),
            ignored=("mtp.*",),
        ),
        defaults={
            **_QWEN_HYBRID,
            "norm_topk_prob": True,
        },
        reads_attention_bias=True,
        has_output_gate=True,
        qk_norm=QkNorm.HEAD,
        norm_offset=True,
    ),
    Family(
        "Qwen3_5ForCausalLM",
        names=TensorNames(delta_net=DeltaNetNames(), ignored=("mtp.*", "model.visual.*")),
        defaults=_QWEN_HYBRID,
        reads_attention_bias=True,
        has_output_gate=True,
        qk_norm=QkNorm.HEAD,
        norm_offset=True,
    ),
    Family(
        "Qwen3_5MoeForCausalLM",
        names=TensorNames(
            experts=QWEN_EXPERTS,
            stacked_experts=replace(
                QWEN_EXPERTS,
                gate=("mlp.experts.gate_up_proj",),
                down="mlp.experts.down_proj",
            ),
            delta_net=DeltaNetNames(),
            ignored=("mtp.*", "model.visual.*"),
        ),
        defaults={**_QWEN_HYBRID, "norm_topk_prob": True},
        reads_attention_bias=True,
        has_output_gate=True,
        qk_norm=QkNorm.HEAD,
        norm_offset=True,
    ),
    Family(
        "KimiLinearForCausalLM",
        names=TensorNames(
            latent=LatentNames(),
            delta_net=DeltaNetNames(
                inputs=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                rates=("self_attn.b_proj",),
                gate=("self_attn.g_a_proj", "self_attn.g_b_proj"),
                decay=("self_attn.f_a_proj", "self_attn.f_b_proj"),
                decay_module="forget_gate",
                convolution=(
                    "self_attn.q_conv1d.weight",
                    "self_attn.k_conv1d.weight",
                    "self_attn.v_conv1d.weight",
                ),
                a_log="self_attn.A_log",
                dt_bias="self_attn.dt_bias",
                norm="self_attn.o_norm.weight",
                output="self_attn.o_proj",
            ),
            experts=replace(
                MIXTRAL_EXPERTS,
                shared_gate=(
                    "block_sparse_moe.shared_experts.gate_proj",
                    "block_sparse_moe.shared_experts.up_proj",
                ),
                shared_down="block_sparse_moe.shared_experts.down_proj",
                choice_bias="block_sparse_moe.gate.e_score_correction_bias",
                choice_bias_is_row=False,
            ),
        ),
        keys={
            "max_position_embeddings": "model_max_length",
            "moe_layer_start_index": "first_k_dense_replace",
            "moe_num_shared_experts": "num_shared_experts",
            "n_group": "num_expert_group",
            "norm_topk_prob": "moe_renormalize",
            "num_experts_per_tok": "num_experts_per_token",
            "num_local_experts": "num_experts",
            "scoring_func": "moe_router_activation_func",
        },
        defaults={
            **LATENT_WIDTHS,
            "first_k_dense_replace": 1,
            "linear_conv_kernel_dim": 4,
            "linear_head_dim": 128,
            "linear_num_heads": 32,
            "moe_intermediate_size": 1024,
            "moe_renormalize": True,
            "num_expert_group": 1,
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_key_value_heads": 32,
            "num_shared_experts": 1,
            "q_lora_rank": None,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 2.446,
            "topk_group": 1,
        },
        scores_by_sigmoid=True,
        rotates_latents=False,
    ),
)
