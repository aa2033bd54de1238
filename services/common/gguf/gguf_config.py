"""config.json of the model in a GGUF file, in the form of transformers.

The values come from the keys that llama.cpp's converter writes. This module adds the constants that
stand in llama.cpp's code alone (Gemma's scales, SmolLM 3's layers without rotation).
"""

from services.common.gguf.gguf_architectures import Architecture, architecture_of
from services.common.gguf.gguf_encoders import is_encoder
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_layers import count_layers
from services.common.gguf.gguf_pooling import answers_yes_or_no, head_of, read_head
from services.common.gguf.gguf_rope import read_rope_scaling
from services.common.json_values import Json

__all__ = ["MARK", "config_of"]

MARK = "tokenwire_gguf"
"""Key of config.json that marks weights with the names and formats of a GGUF file

The value is an object. Its member `fused_qkv` is true if queries, keys and values are one tensor,
and `fused_gate` is true if gate and up of a gated layer are one tensor. `rotary_sections` is true
if RoPE has sections of an image's axes; then the pairs of GLM-4V lie half of the rotated part
apart. `head` lists the modules of
a head that scores texts, and `answers` is true if the two outputs of the head are the logits of yes
and no. `decoder` is the architecture of the text model beside a vision tower, and `refused_images`
says why the mmproj files beside the model are not served. `file` is the path of the GGUF file, for
errors."""

_MATRIX = 2  # dimensions
_FEED_FORWARD_BIASES = ("blk.0.ffn_up.bias", "blk.0.ffn_up_exps.bias")


def config_of(file: GgufFile) -> dict[str, Json]:
    """Return the values of config.json. Raises GgufError for an unsupported architecture."""
    architecture = architecture_of(file)
    values = {**_common(file, architecture), **architecture.extra_keys(file), **read_head(file)}
    renamed = {architecture.names.get(key, key): value for key, value in values.items()}
    name, head = architecture.name, head_of(file)
    if head:
        stem = name.removesuffix("Model").removesuffix("ForCausalLM")
        name = f"{stem}ForSequenceClassification"
    return {
        "architectures": [name],
        **renamed,
        MARK: {
            "fused_qkv": not _has_weight(file, "attn_q"),
            "fused_gate": not _has_weight(file, "ffn_gate"),
            "rotary_sections": file.own("rope.dimension_sections") in file.metadata,
            "head": [*head],
            "answers": answers_yes_or_no(file),
            "file": str(file.path),
        },
    }


def _common(file: GgufFile, architecture: Architecture) -> dict[str, Json]:
    key = file.own
    vocabulary, hidden = _table_shape(file)
    heads = 1
    if architecture.has_attention:
        heads = _heads(file, architecture, hidden)
    head_dim = file.count(key("attention.key_length"), hidden // heads)
    rotated = file.count(key("rope.dimension_count"), head_dim)
    rms = key("attention.layer_norm_rms_epsilon")
    epsilon = rms if rms in file.metadata else key("attention.layer_norm_epsilon")
    values: dict[str, Json] = {
        "vocab_size": vocabulary,
        "hidden_size": file.count(key("embedding_length")),
        "num_hidden_layers": count_layers(file),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integers(key("attention.head_count_kv"), 1, heads, least=1)[0],
        "head_dim": head_dim,
        "max_position_embeddings": file.count(key("context_length")),
        "rms_norm_eps": file.positive(epsilon),
        "rope_theta": file.positive(key("rope.freq_base"), 10000.0),
        "partial_rotary_factor": rotated / head_dim,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": _has_bias(file, "attn_q", "attn_qkv"),
        "attention_output_bias": _has_bias(file, "attn_output"),
        "mlp_bias": not file.tensors.keys().isdisjoint(_FEED_FORWARD_BIASES),
        "rope_scaling": read_rope_scaling(file),
        "is_causal": not is_encoder(file),
        **_special_ids(file),
    }
    if key("feed_forward_length") in file.metadata:
        least = int(architecture.has_attention)  # the first Mambas' layers are one part
        values["intermediate_size"] = file.integers(key("feed_forward_length"), 1, least=least)[0]
    if (window := file.integer(key("attention.sliding_window"), 0)) > 0:  # 0 in Phi 4's files
        values["sliding_window"] = window
    if key("expert_count") in file.metadata:
        experts = file.count(key("expert_count"), least=0)
        least = min(experts, 1)  # a dense model of a family with experts states 0 of them
        values["num_local_experts"] = experts
        values["num_experts_per_tok"] = file.count(
            key("expert_used_count"), least=least, most=experts
        )
        width = key("expert_feed_forward_length")
        if width in file.metadata:
            values["moe_intermediate_size"] = file.count(width, least=least)
        shared = key("expert_shared_feed_forward_length")
        if shared in file.metadata:
            values["shared_expert_intermediate_size"] = file.count(shared, least=0)
    return values


def _heads(file: GgufFile, architecture: Architecture, hidden: int) -> int:
    """Return the heads of all layers, or of the first one if layers may have different numbers."""
    key = file.own("attention.head_count")
    if architecture.has_layer_heads:
        return max(1, file.integers(key, 1, least=1)[0])
    return file.count(key, most=hidden)


def _table_shape(file: GgufFile) -> tuple[int, int]:
    """Return the size of the vocabulary and the width of an embedding."""
    table = file.tensors.get("token_embd.weight")
    if table is None:
        raise GgufError(f"{file.path} has no token_embd.weight, so it holds no language model.")
    if len(table.shape) != _MATRIX or 0 in table.shape:
        raise GgufError(
            f"{file.path}: token_embd.weight must have two dimensions, not {list(table.shape)}."
        )
    vocabulary, hidden = table.shape
    return vocabulary, hidden


def _has_bias(file: GgufFile, *names: str) -> bool:
    """Return whether a layer's tensors of these names have a bias."""
    return any(name.endswith(tuple(f".{each}.bias" for each in names)) for name in file.tensors)


def _has_weight(file: GgufFile, name: str) -> bool:
    """Return whether a layer has a tensor of this name."""
    return any(tensor.endswith(f".{name}.weight") for tensor in file.tensors)


def _special_ids(file: GgufFile) -> dict[str, Json]:
    """Return the ids that begin and end a text or a turn, and those that are never generated."""
    ends = [
        file.integer(key)
        for name in ("eos", "eot", "eom")
        if (key := f"tokenizer.ggml.{name}_token_id") in file.metadata
    ]
    found: dict[str, Json] = {"eos_token_id": list(dict.fromkeys(ends))}
    if "tokenizer.ggml.bos_token_id" in file.metadata:
        found["bos_token_id"] = file.integer("tokenizer.ggml.bos_token_id")
    suppressed = file.metadata.get("tokenizer.ggml.suppress_tokens")
    if isinstance(suppressed, list) and suppressed:
        found["suppress_tokens"] = [*suppressed]
    return found
