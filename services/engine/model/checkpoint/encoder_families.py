"""Encoders, which make embeddings and scores of whole texts."""

from collections.abc import Mapping
from dataclasses import replace

from services.engine.model.checkpoint.alibi_encoders import JINA_V2
from services.engine.model.checkpoint.config import CheckpointError, Config, JsonObject
from services.engine.model.checkpoint.encoder_heads import ROBERTA_HEAD, language_head
from services.engine.model.checkpoint.families import FAMILIES
from services.engine.model.checkpoint.family import (
    EncoderTraits,
    Family,
    HeadStage,
    TensorNames,
    WindowRule,
)
from services.engine.model.checkpoint.rotary_encoders import ROTARY_ENCODERS, rotary_encoder

__all__ = ["COLBERT", "JINA_V5", "POOLING_ARCHITECTURES", "is_bidirectional", "pooling_family"]

COLBERT = "HF_ColBERT"
"""Architecture of colbert-ir's checkpoints: BERT and a projection of each token"""
JINA_V5 = "JinaEmbeddingsV5Model"
"""Architecture of Jina v5: Qwen 3 or EuroBERT, with an adapter for each task"""
_JINA_V4 = "JinaEmbeddingsV4Model"
_CLASSIFIER = "ForSequenceClassification"


def _bert(architecture: str, root: str, traits: EncoderTraits, pad_token_id: int) -> Family:
    names = TensorNames(
        roots={"": "", root: ""},
        embedding="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        layers="encoder.layer",
        qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
        output="attention.output.dense",
        attention_norm="attention.output.LayerNorm",
        gate=("intermediate.dense",),
        down="output.dense",
        feed_forward_norm="output.LayerNorm",
    )
    defaults: JsonObject = {
        "attention_bias": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "mlp_bias": True,
        "pad_token_id": pad_token_id,
    }
    return Family(
        architecture,
        names=names,
        keys={"rms_norm_eps": "layer_norm_eps"},
        defaults=defaults,
        reads_attention_bias=True,
        reads_mlp_bias=True,
        layer_norm=True,
        gated=False,
        encoder=traits,
        has_logits=False,
    )


def _deberta(config: Config) -> Family:
    """Return the family of DeBERTa v2 and v3, whose files may have no positions."""
    activation = config.text("pooler_hidden_act", "gelu")
    traits = EncoderTraits(
        embedding_norm="embeddings.LayerNorm",
        token_types="embeddings.token_type_embeddings",
        is_disentangled=True,
        head=(HeadStage("pooler.dense", activation), HeadStage("classifier", narrows=True)),
    )
    family = _bert("DebertaV2Model", "deberta.", traits, 0)
    parts = ("query_proj", "key_proj", "value_proj")
    has_positions = config.flag("position_biased_input", True)
    return replace(
        family,
        names=replace(
            family.names,
            qkv=tuple(f"attention.self.{part}" for part in parts),
            positions=family.names.positions if has_positions else None,
        ),
        defaults={**family.defaults, "layer_norm_eps": 1e-7, "type_vocab_size": 0},
    )


_EMBEDDINGS = EncoderTraits(
    embedding_norm="embeddings.LayerNorm", token_types="embeddings.token_type_embeddings"
)
_ROBERTA = replace(
    _EMBEDDINGS,
    positions_after_padding=True,
    head=ROBERTA_HEAD,
    language_head=language_head("lm_head.dense", "lm_head.layer_norm", "lm_head.decoder"),
)
_MPNET = Family(
    "MPNetModel",
    names=TensorNames(
        roots={"": "", "mpnet.": ""},
        embedding="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        layers="encoder.layer",
        qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        output="attention.attn.o",
        attention_norm="attention.LayerNorm",
        gate=("intermediate.dense",),
        down="output.dense",
        feed_forward_norm="output.LayerNorm",
    ),
    # transformers' padding_idx is 1, whatever pad_token_id says
    keys={"pad_token_id": "padding_idx", "rms_norm_eps": "layer_norm_eps"},
    defaults={
        "attention_bias": True,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "mlp_bias": True,
        "padding_idx": 1,
    },
    reads_attention_bias=True,
    reads_mlp_bias=True,
    layer_norm=True,
    gated=False,
    encoder=replace(_ROBERTA, token_types=None, attention_bias="encoder.relative_attention_bias"),
    has_logits=False,
)
_DISTILBERT = Family(
    "DistilBertModel",
    names=TensorNames(
        roots={"": "", "distilbert.": ""},
        embedding="embeddings.word_embeddings",
        positions="embeddings.position_embeddings",
        layers="transformer.layer",
        qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        attention_norm="sa_layer_norm",
        gate=("ffn.lin1",),
        down="ffn.lin2",
        feed_forward_norm="output_layer_norm",
    ),
    keys={
        "hidden_act": "activation",
        "hidden_size": "dim",
        "intermediate_size": "hidden_dim",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    },
    defaults={
        "activation": "gelu",
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 1e-12,
    },
    reads_attention_bias=True,
    reads_mlp_bias=True,
    layer_norm=True,
    gated=False,
    encoder=EncoderTraits(
        "embeddings.LayerNorm",
        head=(HeadStage("pre_classifier", "relu"), HeadStage("classifier", narrows=True)),
        language_head=language_head("vocab_transform", "vocab_layer_norm", "vocab_projector"),
    ),
    has_logits=False,
)
_DEBERTA = _deberta(Config("config.json", {}))

ENCODERS: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        _bert(
            "BertModel",
            "bert.",
            replace(
                _EMBEDDINGS,
                head=(
                    HeadStage("bert.pooler.dense", "tanh"),
                    HeadStage("classifier", narrows=True),
                ),
                language_head=language_head(
                    "cls.predictions.transform.dense",
                    "cls.predictions.transform.LayerNorm",
                    "cls.predictions.decoder",
                ),
            ),
            0,
        ),
        _bert("RobertaModel", "roberta.", _ROBERTA, 1),
        _bert("XLMRobertaModel", "roberta.", _ROBERTA, 1),
        Family(
            "ModernBertModel",
            names=TensorNames(
                roots={"": "", "model.": ""},
                embedding="embeddings.tok_embeddings",
                attention_norm="attn_norm",
                qkv=("attn.Wqkv",),
                output="attn.Wo",
                gate=("mlp.Wi",),
                down="mlp.Wo",
                feed_forward_norm="mlp_norm",
                final_norm="final_norm",
            ),
            keys={
                "hidden_act": "hidden_activation",
                "rms_norm_eps": "norm_eps",
                "rope_local_base_freq": "local_rope_theta",
                "rope_theta": "global_rope_theta",
                "sliding_window": "local_attention",
                "sliding_window_pattern": "global_attn_every_n_layers",
            },
            defaults={
                "global_attn_every_n_layers": 3,
                "global_rope_theta": 160000.0,
                "hidden_activation": "gelu",
                "local_attention": 128,
                "norm_eps": 1e-5,
            },
            reads_attention_bias=True,
            reads_mlp_bias=True,
            layer_norm=True,
            windows=WindowRule.SPACED,
            local_rotary=True,
            encoder=EncoderTraits(
                "embeddings.norm",
                norms_first=True,
                head=(
                    HeadStage("head.dense", "gelu"),
                    HeadStage("head.norm", is_norm=True),
                    HeadStage("classifier", narrows=True),
                ),
                language_head=language_head("head.dense", "head.norm", "decoder"),
            ),
            has_logits=False,
        ),
        *ROTARY_ENCODERS,
        JINA_V2,
        _MPNET,
        _DISTILBERT,
        _DEBERTA,
    )
}
"""Encoders by the architecture of the bare model."""
_DECODERS: Mapping[str, Family] = {
    "EuroBert": replace(
        FAMILIES["LlamaForCausalLM"],
        defaults={"rms_norm_eps": 1e-5, "classifier_pooling": "late"},
        is_bidirectional=True,
        head=(HeadStage("dense", "gelu"), HeadStage("classifier", narrows=True)),
    )
}
"""Encoders whose layers are a decoder's without a causal mask"""
POOLING_ARCHITECTURES = (*ENCODERS, *(f"{stem}Model" for stem in _DECODERS), COLBERT, JINA_V5)
"""Architectures that only make embeddings or scores, as errors list them"""


def is_bidirectional(family: Family, config: Config) -> bool:
    """Return whether the tokens of a decoder's checkpoint see all tokens of their text."""
    return not config.flag("is_causal", True) or _halves_windows(family, config)


def pooling_family(name: str, config: Config) -> Family | None:
    """Return the family of a checkpoint that only makes embeddings or scores; None for others.

    name: its architecture in config.json, such as BertForSequenceClassification or Qwen3Model.
    Raises CheckpointError for values of config.json, and for Jina v4, that are not served.
    """
    if name == COLBERT and config.text("model_type", "bert") == "bert":
        return replace(ENCODERS["BertModel"], architecture=name)
    if name == JINA_V5:
        return _jina_v5(config)
    if name == _JINA_V4:
        raise CheckpointError(
            f"{config.file}: {name} is not supported, because only the checkpoint's code knows its "
            "adapters. Serve a checkpoint whose weights contain a task's adapter, such as "
            "jinaai/jina-embeddings-v4-vllm-retrieval, with --pooling mean."
        )
    classifies = name.endswith(_CLASSIFIER)
    stem = name.removesuffix(_CLASSIFIER).removesuffix("ForMaskedLM").removesuffix("Model")
    if (encoder := ENCODERS.get(f"{stem}Model")) is not None:
        kind = config.text("feed_forward_type", "geglu")
        if encoder is JINA_V2 and kind != "geglu":
            raise CheckpointError(f"{config.file}: feed_forward_type must be geglu, got {kind}.")
        encoder = _deberta(config) if encoder is _DEBERTA else rotary_encoder(encoder, config)
        if config.text("layer_norm_type", "layer_norm") != "layer_norm":
            return None
        assert encoder.encoder is not None
        head = encoder.encoder.head if classifies else ()
        return None if classifies and not head else replace(encoder, architecture=name, head=head)
    if stem in _DECODERS:
        decoder = _DECODERS[stem]
        head = decoder.head if classifies else ()
        return replace(decoder, architecture=name, has_logits=False, head=head)
    stem = stem.removesuffix("ForCausalLM").removesuffix("Text")
    causal = FAMILIES.get(f"{stem}ForCausalLM")
    if causal is None or stem == name:
        return None
    head = (HeadStage("score", narrows=True),) if classifies else ()
    return replace(
        causal,
        architecture=name,
        has_logits=False,
        head=head,
        is_bidirectional=is_bidirectional(causal, config),
        halves_windows=_halves_windows(causal, config),
    )


def _jina_v5(config: Config) -> Family:
    """Return the family of Jina v5: that of Qwen 3 (text-small), or of EuroBERT (text-nano).

    Both have the same architecture and model_type. text-nano's file says `"is_decoder": false`;
    files of EuroBERT, on which it is based, always have mask_token_id.
    """
    is_encoder = not config.flag("is_decoder", True) or config.has("mask_token_id")
    base = _DECODERS["EuroBert"] if is_encoder else FAMILIES["Qwen3ForCausalLM"]
    return replace(base, architecture=JINA_V5, has_logits=False, head=(), has_task_adapters=True)


def _halves_windows(family: Family, config: Config) -> bool:
    key = family.bidirectional_key
    return key is not None and config.flag(key, False)
