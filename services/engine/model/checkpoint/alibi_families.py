"""Decoders whose attention falls with the distance of two tokens (ALiBi)."""

from dataclasses import replace

from services.engine.model.checkpoint.family import Family, TensorNames

__all__ = ["ALIBI_FAMILIES"]

_BLOOM = Family(
    "BloomForCausalLM",
    names=TensorNames(
        roots={"transformer.": "lm_head", "": "lm_head"},
        embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        layers="h",
        final_norm="ln_f",
        qkv=("self_attention.query_key_value",),
        output="self_attention.dense",
        gate=("mlp.dense_h_to_4h",),
        down="mlp.dense_4h_to_h",
    ),
    keys={
        "hidden_size": "n_embed",
        "max_position_embeddings": "seq_length",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    defaults={
        "attention_bias": True,
        "hidden_act": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "mlp_bias": True,
        "seq_length": 2048,
        "tie_word_embeddings": True,
    },
    reads_attention_bias=True,
    reads_mlp_bias=True,
    qkv_by_head=True,
    layer_norm=True,
    has_alibi=True,
    gated=False,
    inner_factor=4,
    refused=("apply_residual_connection_post_layernorm",),
)
_MPT = Family(
    "MptForCausalLM",
    names=TensorNames(
        roots={"transformer.": "lm_head", "": "lm_head"},
        embedding="wte",
        layers="blocks",
        final_norm="norm_f",
        attention_norm="norm_1",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        feed_forward_norm="norm_2",
        gate=("ffn.up_proj",),
        down="ffn.down_proj",
    ),
    keys={
        "hidden_size": "d_model",
        "max_position_embeddings": "max_seq_len",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
        "num_key_value_heads": "kv_n_heads",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    parts=("attn_config",),
    defaults={
        "hidden_act": "gelu",
        "layer_norm_epsilon": 1e-5,
        "max_seq_len": 2048,
        "tie_word_embeddings": True,
    },
    reads_clip=True,
    layer_norm=True,
    norm_bias=False,
    has_alibi=True,
    reads_logit_scale=True,
    gated=False,
    inner_factor=4,
    refused=("prefix_lm", "qk_gn", "qk_ln"),
    required=("alibi", "no_bias"),
)

ALIBI_FAMILIES: tuple[Family, ...] = (
    _BLOOM,
    _MPT,
    # Published files name MosaicML's own class.
    replace(_MPT, architecture="MPTForCausalLM"),
)
