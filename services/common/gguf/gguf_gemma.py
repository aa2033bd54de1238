"""Keys of config.json that only Gemma has, from a GGUF file."""

from statistics import NormalDist

from services.common.gguf.gguf_file import GgufFile
from services.common.gguf.gguf_layers import count_layers, read_windows
from services.common.json_values import Json

__all__ = ["read_embedding_gemma", "read_gemma2", "read_gemma3", "read_gemma3n", "read_gemma4"]


def read_gemma2(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Gemma 2."""
    return _read_gemma(file, pattern=2, layers_of_large=46)


def read_gemma3(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Gemma 3."""
    values = _read_gemma(file, pattern=6, layers_of_large=62)
    local = file.positive(file.own("rope.freq_base_swa"), 10000.0)
    return {**values, "rope_local_base_freq": local}


def read_embedding_gemma(file: GgufFile) -> dict[str, Json]:
    """Return the keys of EmbeddingGemma."""
    return {**read_gemma3(file), "use_bidirectional_attention": True}


def _read_gemma(file: GgufFile, pattern: int, layers_of_large: int) -> dict[str, Json]:
    """Return the keys of Gemma 2 and 3.

    The largest models scale queries by hidden size / heads, all others by the width of a head.
    """
    values: dict[str, Json] = {**read_windows(file, pattern), "attention_bias": False}
    if count_layers(file) == layers_of_large:
        hidden = file.count(file.own("embedding_length"))
        heads = file.count(file.own("attention.head_count"), most=hidden)
        values["query_pre_attn_scalar"] = hidden // heads
    else:
        values["query_pre_attn_scalar"] = file.count(file.own("attention.key_length"))
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        values[key] = file.number(file.own(key), 0.0)
    return values


def read_gemma3n(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Gemma 3n; llama.cpp has defaults for what older files leave out."""
    own, layers = file.own, count_layers(file)
    # minus infinity in layers that leave no gates out
    scales = file.numbers(own("activation_sparsity_scale"), finite=False)
    values: dict[str, Json] = {
        **read_windows(file, 5),
        "intermediate_size": [*file.integers(own("feed_forward_length"), layers)],
        "num_kv_shared_layers": file.count(
            own("attention.shared_kv_layers"), max(layers - 20, 0), least=0
        ),
        "hidden_size_per_layer_input": file.count(own("embedding_length_per_layer_input"), 256),
        "altup_num_inputs": file.count(own("altup.num_inputs"), 4),
        "altup_active_idx": file.count(own("altup.active_idx"), 0, least=0),
        "final_logit_softcapping": file.number(own("final_logit_softcapping"), 30.0),
        "rope_local_base_freq": file.positive(own("rope.freq_base_swa"), 10000.0),
    }
    if scales:  # the standard deviations that leave out a share of the gates
        shares = [NormalDist().cdf(scale) for scale in scales[:layers]]
        values["activation_sparsity_pattern"] = [*shares]
    for key, name in {
        "laurel_rank": "blk.0.laurel_l.weight",
        "vocab_size_per_layer_input": "per_layer_token_embd.weight",
    }.items():
        if name in file.tensors:
            values[key] = file.tensors[name].shape[0]
    return values


def read_gemma4(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Gemma 4, whose layers differ in their heads and widths."""
    own, layers = file.own, count_layers(file)
    has_window = file.integers(own("attention.sliding_window_pattern"), layers)
    heads = file.integers(own("attention.head_count_kv"), layers)
    widths = file.integers(own("feed_forward_length"), layers)
    whole = [layer for layer in range(layers) if not has_window[layer]]
    divisors = file.floats("rope_freqs.weight") or [1.0]
    table = file.tensors.get("per_layer_token_embd.weight")
    values: dict[str, Json] = {
        **read_windows(file, 6),
        "head_dim": file.count(own("attention.key_length_swa")),
        "global_head_dim": file.count(own("attention.key_length")),
        "num_key_value_heads": next(
            (heads[layer] for layer in range(layers) if has_window[layer]), heads[0]
        ),
        "per_layer_config": {str(layer): {"num_key_value_heads": heads[layer]} for layer in whole},
        "attention_k_eq_v": bool(whole) and f"blk.{whole[0]}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": file.count(own("attention.shared_kv_layers"), 0, least=0),
        "hidden_size_per_layer_input": file.count(
            own("embedding_length_per_layer_input"), 0, least=0
        ),
        "use_double_wide_mlp": widths[layers - 1] == 2 * widths[0],
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in file.tensors,
        "final_logit_softcapping": file.number(own("final_logit_softcapping"), 0.0),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": file.positive(own("rope.freq_base"), 1e6),
                "partial_rotary_factor": divisors.count(1.0) / len(divisors),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.positive(own("rope.freq_base_swa"), 10000.0),
            },
        },
    }
    if table is not None:
        values["vocab_size_per_layer_input"] = table.shape[0]
    if values["enable_moe_block"]:
        values["num_experts"] = file.count(own("expert_count"))
        values["top_k_experts"] = file.count(own("expert_used_count"))
    return values
