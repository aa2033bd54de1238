"""Encoders of GGUF files: their keys of config.json."""

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.json_values import Json

__all__ = ["is_encoder", "read_encoder", "read_modern_bert", "read_nomic_experts"]

_ENCODERS = (
    *("bert", "eurobert", "gemma-embedding", "jina-bert-v2", "jina-bert-v3", "modern-bert"),
    *("nomic-bert", "nomic-bert-moe"),
)
_CAUSAL = "attention.causal"


def is_encoder(file: GgufFile) -> bool:
    """Return whether every token sees all tokens of its text.

    Raises GgufError for an encoder with a causal mask.
    """
    key = file.own(_CAUSAL)
    if file.architecture not in _ENCODERS:
        return not file.flag(key, True)
    if file.flag(key, False):
        raise GgufError(f"{file.path}: {key} is true, which is not supported for encoders.")
    return True


def read_encoder(file: GgufFile) -> dict[str, Json]:
    """Return the keys of BERT and its relatives."""
    types = file.tensors.get("token_types.weight")
    return {
        "pad_token_id": file.count("tokenizer.ggml.padding_token_id", 0, least=0),
        "type_vocab_size": 0 if types is None else types.shape[0],
    }


def read_nomic_experts(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Nomic's encoder with experts, by the names of its first files."""
    return {
        **read_encoder(file),
        "activation_function": "gelu",
        "moe_every_n_layers": file.count(file.own("moe_every_n_layers")),
    }


def read_modern_bert(file: GgufFile) -> dict[str, Json]:
    """Return the keys of ModernBERT, whose layers differ in their windows and rotations."""
    base = file.positive(file.own("rope.freq_base"), 160000.0)
    return {
        "global_rope_theta": base,
        "local_rope_theta": file.positive(file.own("rope.freq_base_swa"), base),
        "global_attn_every_n_layers": file.count(file.own("attention.sliding_window_pattern"), 3),
        "hidden_activation": file.text(file.own("hidden_activation"), "gelu"),
    }
