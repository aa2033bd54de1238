"""Encoders that norm after each addition, and rotate queries and keys."""

from dataclasses import replace

from services.engine.model.checkpoint.encoder_heads import ROBERTA_HEAD, language_head
from services.engine.model.checkpoint.family import EncoderTraits, Family, HeadStage, TensorNames

__all__ = ["NOMIC", "NOMIC_FIRST", "ROTARY_ENCODERS"]

NOMIC = Family(
    "NomicBertModel",
    names=TensorNames(
        roots={"": "", "nomic_bert.": "", "bert.": ""},
        embedding="embeddings.word_embeddings",
        layers="encoder.layers",
        qkv=("attn.Wqkv",),
        output="attn.out_proj",
        attention_norm="norm1",
        gate=("mlp.fc12", "mlp.fc11"),
        down="mlp.fc2",
        feed_forward_norm="norm2",
    ),
    keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={"layer_norm_eps": 1e-12, "rope_theta": 1000.0},
    refused=("moe_every_n_layers",),
    layer_norm=True,
    encoder=EncoderTraits("emb_ln", token_types="embeddings.token_type_embeddings"),
    has_logits=False,
)
NOMIC_FIRST = replace(
    NOMIC,
    keys={
        "hidden_size": "n_embd",
        "intermediate_size": "n_inner",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
        "partial_rotary_factor": "rotary_emb_fraction",
        "rms_norm_eps": "layer_norm_epsilon",
        "rope_theta": "rotary_emb_base",
        "hidden_act": "hidden_activation",
    },
    defaults={"layer_norm_epsilon": 1e-12, "rotary_emb_base": 1000.0},
)
"""Nomic's encoder with the keys of its first files"""
_JINA = Family(
    "JinaEmbeddingsV3Model",
    names=TensorNames(
        roots={"": "", "roberta.": ""},
        embedding="embeddings.word_embeddings",
        layers="encoder.layers",
        qkv=("mixer.Wqkv",),
        output="mixer.out_proj",
        attention_norm="norm1",
        gate=("mlp.fc1",),
        down="mlp.fc2",
        feed_forward_norm="norm2",
    ),
    keys={"rms_norm_eps": "layer_norm_eps"},
    defaults={
        "attention_bias": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-5,
        "mlp_bias": True,
        "rope_theta": 20000.0,
        "type_vocab_size": 1,
    },
    reads_attention_bias=True,
    reads_mlp_bias=True,
    layer_norm=True,
    gated=False,
    encoder=EncoderTraits(
        "emb_ln",
        token_types="embeddings.token_type_embeddings",
        head=ROBERTA_HEAD,
        language_head=language_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
    ),
    has_logits=False,
)


def _gte(architecture: str, root: str, rope_theta: float) -> Family:
    """Return GTE's family under transformers' name, or under that of its first files."""
    return Family(
        architecture,
        names=TensorNames(
            roots={"": "", root: ""},
            embedding="embeddings.word_embeddings",
            layers="encoder.layer",
            qkv=("attention.qkv_proj",),
            output="attention.o_proj",
            attention_norm="attn_ln",
            gate=("mlp.up_gate_proj",),
            down="mlp.down_proj",
            feed_forward_norm="mlp_ln",
        ),
        keys={"rms_norm_eps": "layer_norm_eps"},
        defaults={
            "attention_bias": True,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-12,
            "rope_theta": rope_theta,
            "position_embedding_type": "rope",
            "type_vocab_size": 1,
        },
        refused=("logn_attention_scale",),
        reads_attention_bias=True,
        reads_position_type=True,
        layer_norm=True,
        encoder=EncoderTraits(
            "embeddings.LayerNorm",
            token_types="embeddings.token_type_embeddings",
            up_comes_first=True,
            head=(
                HeadStage(f"{root}pooler.dense", "tanh"),
                HeadStage("classifier", narrows=True),
            ),
            language_head=language_head("lm_head.dense", "lm_head.norm", "lm_head.decoder"),
        ),
        has_logits=False,
    )


ROTARY_ENCODERS = (
    NOMIC,
    _JINA,
    _gte("GteModel", "gte.", 160000.0),
    _gte("NewModel", "new.", 10000.0),
)
