"""Encoders that norm after each addition, and rotate queries and keys."""

from dataclasses import replace

from services.engine.model.checkpoint.config import Config
from services.engine.model.checkpoint.encoder_heads import ROBERTA_HEAD, language_head
from services.engine.model.checkpoint.expert_names import ExpertTensorNames
from services.engine.model.checkpoint.family import EncoderTraits, Family, HeadStage, TensorNames

__all__ = ["ROTARY_ENCODERS", "rotary_encoder"]

_XLM = "XLMRobertaModel"
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
"""Nomic's encoder, with the config keys of its first files"""
NOMIC_EXPERTS = replace(
    NOMIC_FIRST,
    names=replace(
        NOMIC.names,
        gate=("mlp.fc1",),
        experts=ExpertTensorNames(
            router="mlp.router.layer",
            gate=("mlp.experts.mlp.w1",),
            down="mlp.experts.mlp.w2",
            output_bias="mlp.experts.bias",
        ),
    ),
    keys={
        **NOMIC_FIRST.keys,
        "attention_bias": "qkv_proj_bias",
        "hidden_act": "activation_function",
        "mlp_bias": "mlp_fc1_bias",
        "norm_topk_prob": "moe_normalize_expert_weights",
        "num_experts_per_tok": "moe_top_k",
    },
    defaults={**NOMIC_FIRST.defaults, "moe_top_k": 1},
    refused=("expert_choice_router", "num_shared_experts", "rotary_emb_interleaved"),
    reads_attention_bias=True,
    reads_mlp_bias=True,
    gated=False,
)
"""Nomic's encoder with experts in some layers (v2), whose files have the same keys"""
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
_JINA_FIRST = replace(
    _JINA,
    keys={
        "rms_norm_eps": "layer_norm_eps",
        "rope_theta": "rotary_emb_base",
    },
    defaults={
        **{key: value for key, value in _JINA.defaults.items() if key != "rope_theta"},
        "rotary_emb_base": 20000.0,
    },
    encoder=replace(_JINA.encoder, has_tasks=True) if _JINA.encoder is not None else None,
)
"""Jina v3, with the config keys of its first files, which call it XLM-R and hold adapters"""


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
"""Rotary encoders by transformers' keys"""


def rotary_encoder(family: Family, config: Config) -> Family:
    """Return the family of a checkpoint, whose file may have other keys or layers than `family`."""
    if family is NOMIC and config.integer("moe_every_n_layers", 0) > 0:
        return NOMIC_EXPERTS
    if family.architecture == _XLM and config.text("position_embedding_type", "") == "rotary":
        return _JINA_FIRST
    return NOMIC_FIRST if family is NOMIC and config.has("n_embd") else family
