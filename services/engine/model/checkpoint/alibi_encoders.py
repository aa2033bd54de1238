"""Encoders whose attention falls with the distance of two tokens (ALiBi)."""

from services.engine.model.checkpoint.family import EncoderTraits, Family, HeadStage, TensorNames

__all__ = ["JINA_V2"]

JINA_V2 = Family(
    "JinaBertModel",
    names=TensorNames(
        roots={"": "", "bert.": ""},
        embedding="embeddings.word_embeddings",
        layers="encoder.layer",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        output="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        gate=("mlp.gated_layers",),
        down="mlp.wo",
        feed_forward_norm="mlp.layernorm",
    ),
    keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={"attention_bias": True, "hidden_act": "gelu", "layer_norm_eps": 1e-12},
    reads_attention_bias=True,
    layer_norm=True,
    has_alibi=True,
    encoder=EncoderTraits(
        "embeddings.LayerNorm",
        token_types="embeddings.token_type_embeddings",
        head=(HeadStage("bert.pooler.dense", "tanh"), HeadStage("classifier", narrows=True)),
    ),
    has_logits=False,
)
"""Jina v2, with a gate in the feed-forward layer. Variants that norm queries and keys are refused,
because they have further tensors"""
