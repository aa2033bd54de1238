"""Architectures of llama.cpp: a row for each, with the keys of config.json that only it has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from services.common.gguf.gguf_file import GgufFile
from services.common.gguf.gguf_rope import rope_scaling
from services.common.json_values import Json

__all__ = ["ARCHITECTURES", "MIXTRAL", "OLMO3", "Architecture"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of llama.cpp."""

    name: str
    """Architecture in transformers"""
    names: Mapping[str, str] = field(default_factory=dict)
    """Llama's keys of config.json that have another name"""
    further: Callable[[GgufFile], dict[str, Json]] = field(default=lambda _: {})
    """Keys that only this architecture has"""


def _windows(file: GgufFile, pattern: int) -> dict[str, Json]:
    """Return the layers with a window: all but every `pattern`-th, unless the file lists them."""
    name = file.architecture
    key = f"{name}.attention.sliding_window_pattern"
    if not isinstance(file.metadata.get(key), list):
        return {"sliding_window_pattern": file.integer(key, pattern)}
    layers = file.integer(f"{name}.block_count")
    return {
        "layer_types": [
            "sliding_attention" if each else "full_attention"
            for each in file.integers(key, layers)[:layers]
        ]
    }


def _gemma(file: GgufFile, pattern: int, layers_of_large: int) -> dict[str, Json]:
    """Return the keys of Gemma 2 and 3. In their largest models, heads are narrower than scaled."""
    name = file.architecture
    is_large = file.integer(f"{name}.block_count") == layers_of_large
    values: dict[str, Json] = {**_windows(file, pattern), "attention_bias": False}
    if is_large:
        hidden = file.integer(f"{name}.embedding_length")
        values["query_pre_attn_scalar"] = hidden // file.integer(f"{name}.attention.head_count")
    else:
        values["query_pre_attn_scalar"] = file.integer(f"{name}.attention.key_length")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        values[key] = file.number(f"{name}.{key}", 0.0)
    return values


def _gemma3(file: GgufFile) -> dict[str, Json]:
    values = _gemma(file, pattern=6, layers_of_large=62)
    local = file.number("gemma3.rope.freq_base_swa", 10000.0)
    return {**values, "rope_local_base_freq": local}


def _gemma4(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Gemma 4, whose layers differ in their heads and widths."""

    def integer(key: str, default: int | None = None) -> int:
        return file.integer(f"gemma4.{key}", default)

    layers = integer("block_count")
    has_window = file.integers("gemma4.attention.sliding_window_pattern", layers)
    heads = file.integers("gemma4.attention.head_count_kv", layers)
    widths = file.integers("gemma4.feed_forward_length", layers)
    whole = [layer for layer in range(layers) if not has_window[layer]]
    divisors = file.floats("rope_freqs.weight") or [1.0]
    table = file.tensors.get("per_layer_token_embd.weight")
    values: dict[str, Json] = {
        "layer_types": [
            "sliding_attention" if each else "full_attention" for each in has_window[:layers]
        ],
        "head_dim": integer("attention.key_length_swa"),
        "global_head_dim": integer("attention.key_length"),
        "num_key_value_heads": next(
            (heads[layer] for layer in range(layers) if has_window[layer]), heads[0]
        ),
        "per_layer_config": {str(layer): {"num_key_value_heads": heads[layer]} for layer in whole},
        "attention_k_eq_v": bool(whole) and f"blk.{whole[0]}.attn_v.weight" not in file.tensors,
        "num_kv_shared_layers": integer("attention.shared_kv_layers", 0),
        "hidden_size_per_layer_input": integer("embedding_length_per_layer_input", 0),
        "use_double_wide_mlp": widths[layers - 1] == 2 * widths[0],
        "enable_moe_block": "blk.0.ffn_gate_inp.weight" in file.tensors,
        "final_logit_softcapping": file.number("gemma4.final_logit_softcapping", 0.0),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": file.number("gemma4.rope.freq_base", 1e6),
                "partial_rotary_factor": divisors.count(1.0) / len(divisors),
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.number("gemma4.rope.freq_base_swa", 10000.0),
            },
        },
    }
    if table is not None:
        values["vocab_size_per_layer_input"] = table.shape[0]
    if values["enable_moe_block"]:
        values["num_experts"] = integer("expert_count")
        values["top_k_experts"] = integer("expert_used_count")
    return values


def _granite(file: GgufFile) -> dict[str, Json]:
    name = file.architecture
    return {
        "embedding_multiplier": file.number(f"{name}.embedding_scale", 1.0),
        "residual_multiplier": file.number(f"{name}.residual_scale", 1.0),
        "attention_multiplier": file.number(f"{name}.attention.scale", 1.0),
        "logits_scaling": file.number(f"{name}.logit_scale", 1.0),
    }


def _delta_net(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Qwen's hybrids, whose layers are gated delta nets or attention."""
    name = file.architecture
    layers = file.integer(f"{name}.block_count")
    layers -= file.integer(f"{name}.nextn_predict_layers", 0)
    interval = max(file.integer(f"{name}.full_attention_interval", 4), 1)
    recurrent = file.numbers(f"{name}.attention.recurrent_layers") or [
        (layer + 1) % interval for layer in range(layers)
    ]
    value_heads = file.integer(f"{name}.ssm.time_step_rank")
    return {
        "layer_types": [
            "linear_attention" if each else "full_attention" for each in recurrent[:layers]
        ],
        "linear_conv_kernel_dim": file.integer(f"{name}.ssm.conv_kernel"),
        "linear_key_head_dim": file.integer(f"{name}.ssm.state_size"),
        "linear_num_key_heads": file.integer(f"{name}.ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": file.integer(f"{name}.ssm.inner_size") // max(value_heads, 1),
    }


def _cohere(file: GgufFile) -> dict[str, Json]:
    name = file.architecture
    return {
        "logit_scale": file.number(f"{name}.logit_scale"),
        **_windows(file, 4),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _gpt_oss(file: GgufFile) -> dict[str, Json]:
    # OpenAI's own code does not round the ends of YaRN's ramp
    return {"rope_scaling": {**rope_scaling(file), "truncate": False}}


def _olmo3(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Olmo 3, whose layers with a window rotate without scaling."""
    base = file.number("olmo2.rope.freq_base", 10000.0)
    local = file.number("olmo2.rope.freq_base_swa", base)
    return {
        **_windows(file, 4),
        "rope_parameters": {
            "full_attention": {**rope_scaling(file), "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _apertus(file: GgufFile) -> dict[str, Json]:
    """Return the constants of xIELU, one of each for each layer."""
    return {f"xielu_{name}": [*file.numbers(f"xielu.{name}")] for name in _XIELU}


def _stablelm(file: GgufFile) -> dict[str, Json]:
    # the file's own use_parallel_residual is true wherever the checkpoint has no such key
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _output_bias(file: GgufFile) -> dict[str, Json]:
    return {"lm_head_bias": "output.bias" in file.tensors}


def _ernie_experts(file: GgufFile) -> dict[str, Json]:
    """Return the keys of ERNIE's experts, of which the shared ones count, as one is too narrow."""
    name = file.architecture
    return {
        "moe_layer_start_index": file.integer(f"{name}.leading_dense_block_count", 0),
        "moe_layer_interval": file.integer(f"{name}.interleave_moe_layer_step", 1),
        "moe_num_shared_experts": file.integer(f"{name}.expert_shared_count", 0),
    }


_XIELU = ("alpha_p", "alpha_n", "beta", "eps")
_USE_BIAS = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
OLMO3 = Architecture("Olmo3ForCausalLM", further=_olmo3)
MIXTRAL = Architecture("MixtralForCausalLM", further=lambda _: {"norm_topk_prob": True})
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM"),
    "internlm2": Architecture("LlamaForCausalLM"),
    "mistral3": Architecture("Ministral3ForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2vl": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3vl": Architecture("Qwen3ForCausalLM"),
    **dict.fromkeys(
        ("qwen3moe", "qwen3vlmoe"),
        Architecture("Qwen3MoeForCausalLM", further=lambda _: {"norm_topk_prob": True}),
    ),
    "gemma2": Architecture("Gemma2ForCausalLM", further=lambda file: _gemma(file, 2, 46)),
    "gemma3": Architecture("Gemma3ForCausalLM", further=_gemma3),
    "gemma4": Architecture("Gemma4ForCausalLM", further=_gemma4),
    "phi3": Architecture("Phi3ForCausalLM"),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "granite": Architecture("GraniteForCausalLM", further=_granite),
    "granitemoe": Architecture(
        "GraniteMoeForCausalLM",
        further=lambda file: {**_granite(file), "norm_topk_prob": True},
    ),
    "smollm3": Architecture("SmolLM3ForCausalLM"),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        {"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias", "mlp_bias": "use_bias"},
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        {
            "hidden_size": "n_embd",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "rms_norm_eps": "layer_norm_epsilon",
        },
    ),
    "gpt-oss": Architecture("GptOssForCausalLM", further=_gpt_oss),
    "qwen35": Architecture("Qwen3_5ForCausalLM", further=_delta_net),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", further=_delta_net),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", {"attention_bias": "qkv_bias"}),
    "olmoe": Architecture("OlmoeForCausalLM"),
    "command-r": Architecture(
        "CohereForCausalLM", {"rms_norm_eps": "layer_norm_eps"}, further=_cohere
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", {"rms_norm_eps": "layer_norm_eps"}, further=_cohere
    ),
    "arcee": Architecture("ArceeForCausalLM"),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", _USE_BIAS),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        {**_USE_BIAS, "num_local_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        further=_ernie_experts,
    ),
    "chatglm": Architecture("GlmForCausalLM"),
    "glm4": Architecture("Glm4ForCausalLM"),
    "exaone4": Architecture("Exaone4ForCausalLM", further=lambda file: _windows(file, 4)),
    "seed_oss": Architecture("SeedOssForCausalLM"),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", {"num_experts_per_tok": "moe_topk"}),
    "apertus": Architecture("ApertusForCausalLM", further=_apertus),
    "nemotron": Architecture("NemotronForCausalLM", {"rms_norm_eps": "norm_eps"}),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        {
            "partial_rotary_factor": "rotary_pct",
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
        },
        further=lambda file: {
            "use_parallel_residual": file.flag("gptneox.use_parallel_residual", True)
        },
    ),
    "phi2": Architecture(
        "PhiForCausalLM", {"rms_norm_eps": "layer_norm_eps"}, further=_output_bias
    ),
    "phimoe": Architecture("PhimoeForCausalLM", further=_output_bias),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        {"attention_bias": "use_qkv_bias", "rms_norm_eps": "layer_norm_eps"},
        further=_stablelm,
    ),
    "qwen3next": Architecture("Qwen3NextForCausalLM", further=_delta_net),
}
