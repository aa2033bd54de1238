"""config.json of the model in a GGUF file, as transformers would have it.

The keys are those that llama.cpp's converter writes; what it leaves out because llama.cpp has it in
its code (Gemma's scales, SmolLM 3's layers without rotation) is added here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist

from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.json_values import Json

__all__ = ["MARK", "config_of"]

MARK = "tokenwire_gguf"
"""Key of config.json that says that the weights are named and stored as GGUF has them"""

_FEED_FORWARD_BIASES = ("blk.0.ffn_up.bias", "blk.0.ffn_up_exps.bias")


@dataclass(frozen=True, slots=True)
class _Architecture:
    """An architecture of llama.cpp."""

    name: str
    """Architecture in transformers"""
    names: Mapping[str, str] = field(default_factory=dict)
    """Llama's keys of config.json that have another name"""
    further: Callable[[GgufFile], dict[str, Json]] = field(default=lambda _: {})
    """Keys that only this architecture has"""


def config_of(file: GgufFile) -> dict[str, Json]:
    """Return the values of config.json. Raises GgufError for an unsupported architecture."""
    name = file.architecture
    if name not in _ARCHITECTURES:
        raise GgufError(
            f"{file.path}: the architecture {name} is not supported. Supported: "
            f"{', '.join(_ARCHITECTURES)}."
        )
    architecture = _ARCHITECTURES[name]
    if name == "llama" and "llama.expert_count" in file.metadata:
        architecture = _MIXTRAL
    if name == "deepseek2":
        architecture = _deepseek2(file)
    values = {**_common(file), **architecture.further(file)}
    renamed = {architecture.names.get(key, key): value for key, value in values.items()}
    return {"architectures": [architecture.name], **renamed, MARK: name}


def _common(file: GgufFile) -> dict[str, Json]:
    def key(name: str) -> str:
        return f"{file.architecture}.{name}"

    if "token_embd.weight" not in file.tensors:
        raise GgufError(f"{file.path} has no token_embd.weight, so it holds no language model.")
    vocabulary, hidden = file.tensors["token_embd.weight"].shape
    heads = file.integer(key("attention.head_count"))
    head_dim = file.integer(key("attention.key_length"), hidden // max(heads, 1))
    rotated = file.integer(key("rope.dimension_count"), head_dim)
    rms = key("attention.layer_norm_rms_epsilon")
    epsilon = rms if rms in file.metadata else key("attention.layer_norm_epsilon")
    values: dict[str, Json] = {
        "vocab_size": vocabulary,
        "hidden_size": file.integer(key("embedding_length")),
        "num_hidden_layers": file.integer(key("block_count"))
        - file.integer(key("nextn_predict_layers"), 0),
        "num_attention_heads": heads,
        "num_key_value_heads": file.integers(key("attention.head_count_kv"), 1, heads)[0],
        "head_dim": head_dim,
        "max_position_embeddings": file.integer(key("context_length")),
        "rms_norm_eps": file.number(epsilon),
        "rope_theta": file.number(key("rope.freq_base"), 10000.0),
        "partial_rotary_factor": rotated / head_dim,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": _has_bias(file, "attn_q", "attn_qkv"),
        "mlp_bias": not file.tensors.keys().isdisjoint(_FEED_FORWARD_BIASES),
        **_ends(file),
    }
    if key("feed_forward_length") in file.metadata:
        values["intermediate_size"] = file.integers(key("feed_forward_length"), 1)[0]
    if (scaling := _rope_scaling(file)) is not None:
        values["rope_scaling"] = scaling
    if key("attention.sliding_window") in file.metadata:
        values["sliding_window"] = file.integer(key("attention.sliding_window"))
    if key("expert_count") in file.metadata:
        values["num_local_experts"] = file.integer(key("expert_count"))
        values["num_experts_per_tok"] = file.integer(key("expert_used_count"))
        width = key("expert_feed_forward_length")
        if width in file.metadata:
            values["moe_intermediate_size"] = file.integer(width)
        shared = key("expert_shared_feed_forward_length")
        if shared in file.metadata:
            values["shared_expert_intermediate_size"] = file.integer(shared)
    return values


def _has_bias(file: GgufFile, *names: str) -> bool:
    """Return whether a layer's tensors of these names have a bias."""
    return any(name.endswith(tuple(f".{each}.bias" for each in names)) for name in file.tensors)


def _ends(file: GgufFile) -> dict[str, Json]:
    """Return the ids that begin and end a text; the end of a turn ends it too."""
    ends = [
        file.integer(key)
        for name in ("eos", "eot", "eom")
        if (key := f"tokenizer.ggml.{name}_token_id") in file.metadata
    ]
    found: dict[str, Json] = {"eos_token_id": list(dict.fromkeys(ends))}
    if "tokenizer.ggml.bos_token_id" in file.metadata:
        found["bos_token_id"] = file.integer("tokenizer.ggml.bos_token_id")
    return found


def _rope_scaling(file: GgufFile) -> dict[str, Json] | None:
    prefix = f"{file.architecture}.rope.scaling"
    context = file.integer(f"{file.architecture}.context_length")
    original = file.integer(f"{prefix}.original_context_length", context)
    long = file.floats("rope_factors_long.weight")
    short = file.floats("rope_factors_short.weight")
    if long is not None and short is not None:
        scaling: dict[str, Json] = {
            "rope_type": "longrope",
            "long_factor": [*long],
            "short_factor": [*short],
            "original_max_position_embeddings": original,
        }
        if f"{prefix}.attn_factor" in file.metadata:
            scaling["attention_factor"] = file.number(f"{prefix}.attn_factor")
        return scaling
    divisors = file.floats("rope_freqs.weight")
    if divisors is not None:  # Llama 3.1's scaling, computed
        return {
            "rope_type": "longrope",
            "long_factor": [*divisors],
            "short_factor": [*divisors],
            "attention_factor": 1.0,
            "original_max_position_embeddings": context,
        }
    kind = file.text(f"{prefix}.type", "none")
    if kind == "none":
        return None
    return {
        "rope_type": kind,
        "factor": file.number(f"{prefix}.factor"),
        "original_max_position_embeddings": original,
    }


def _gemma(file: GgufFile, pattern: int, layers_of_large: int) -> dict[str, Json]:
    """Return the keys of Gemma 2 and 3. In their largest models, heads are narrower than scaled."""
    name = file.architecture
    is_large = file.integer(f"{name}.block_count") == layers_of_large
    values: dict[str, Json] = {
        "sliding_window_pattern": file.integer(f"{name}.attention.sliding_window_pattern", pattern),
        "attention_bias": False,
    }
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


def _gemma3n(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Gemma 3n; llama.cpp has defaults for what older files leave out."""

    def integer(key: str, default: int) -> int:
        return file.integer(f"gemma3n.{key}", default)

    layers = file.integer("gemma3n.block_count")
    scales = file.numbers("gemma3n.activation_sparsity_scale")
    values: dict[str, Json] = {
        **_windows(file, layers, pattern=5),
        "intermediate_size": [*file.integers("gemma3n.feed_forward_length", layers)],
        "num_kv_shared_layers": integer("attention.shared_kv_layers", max(layers - 20, 0)),
        "hidden_size_per_layer_input": integer("embedding_length_per_layer_input", 256),
        "altup_num_inputs": integer("altup.num_inputs", 4),
        "altup_active_idx": integer("altup.active_idx", 0),
        "final_logit_softcapping": file.number("gemma3n.final_logit_softcapping", 30.0),
        "rope_local_base_freq": file.number("gemma3n.rope.freq_base_swa", 10000.0),
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


def _windows(file: GgufFile, layers: int, pattern: int) -> dict[str, Json]:
    """Return which layers have a window: a list, or one layer in `pattern` has none."""
    key = f"{file.architecture}.attention.sliding_window_pattern"
    if not isinstance(file.metadata.get(key, pattern), list):
        return {"sliding_window_pattern": file.integer(key, pattern)}
    has_window = file.integers(key, layers)[:layers]
    return {
        "layer_types": ["sliding_attention" if each else "full_attention" for each in has_window]
    }


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
        **_windows(file, layers, pattern=6),
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
        "sliding_window_pattern": file.integer(f"{name}.attention.sliding_window_pattern", 4),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _gpt_oss(file: GgufFile) -> dict[str, Json]:
    scaling = _rope_scaling(file)
    if scaling is None:
        return {}
    # OpenAI's own code does not round the ends of YaRN's ramp
    return {"rope_scaling": {**scaling, "truncate": False}}


def _deepseek2(file: GgufFile) -> _Architecture:
    """Return the architecture of latent attention: DeepSeek V2 or V3, or a dense one."""
    name = "YoutuForCausalLM"
    if "deepseek2.expert_count" in file.metadata:
        gating = file.integer("deepseek2.expert_gating_func", 0)
        table = file.tensors.get("token_embd.weight")
        # files of GLM-4.7 Flash don't say that experts are weighed by sigmoids
        is_glm = not gating and table is not None and table.shape[0] == _GLM_VOCABULARY
        is_v3 = gating == _SIGMOIDS or is_glm
        name = "DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"
    if (growth := "deepseek2.attention.temperature_scale") in file.metadata:
        raise GgufError(f"{file.path}: {growth} (Mistral Large 3) is not supported.")
    return _Architecture(name, further=_latent)


def _latent(file: GgufFile) -> dict[str, Json]:
    """Return the keys of latent attention and of DeepSeek's experts."""

    def integer(key: str, default: int | None = None) -> int:
        return file.integer(f"deepseek2.{key}", default)

    rotated, vectors = integer("rope.dimension_count"), integer("attention.q_lora_rank", 0)
    groups = integer("expert_group_count", 1)
    values: dict[str, Json] = {
        "attention_bias": False,
        "first_k_dense_replace": integer("leading_dense_block_count", 0),
        "kv_lora_rank": integer("attention.kv_lora_rank"),
        "n_group": groups,
        "n_routed_experts": integer("expert_count", 0),
        "n_shared_experts": integer("expert_shared_count", 0),
        "norm_topk_prob": file.flag("deepseek2.expert_weights_norm", False),
        "num_key_value_heads": integer("attention.head_count"),
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": vectors or None,
        "qk_nope_head_dim": integer("attention.key_length_mla") - rotated,
        "qk_rope_head_dim": rotated,
        "routed_scaling_factor": file.number("deepseek2.expert_weights_scale", 1.0),
        "topk_group": integer("expert_group_used_count", 1),
        "v_head_dim": integer("attention.value_length_mla"),
    }
    if file.integer("deepseek2.expert_gating_func", 0) != _SIGMOIDS and groups > 1:
        values["topk_method"] = "group_limited_greedy"
    scaling, weight = _rope_scaling(file), "deepseek2.rope.scaling.yarn_log_multiplier"
    if scaling is not None and weight in file.metadata:
        # the converter writes a tenth, and llama.cpp takes both factors as equal
        factor = file.number(weight) * 10
        values["rope_scaling"] = {**scaling, "mscale": factor, "mscale_all_dim": factor}
    return values


_SIGMOIDS = 2
"""Number of sigmoids among llama.cpp's functions of experts' scores"""
_GLM_VOCABULARY = 154_880
_MIXTRAL = _Architecture("MixtralForCausalLM", further=lambda _: {"norm_topk_prob": True})
_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture("LlamaForCausalLM"),
    "qwen2": _Architecture("Qwen2ForCausalLM"),
    "qwen3": _Architecture("Qwen3ForCausalLM"),
    "qwen3moe": _Architecture("Qwen3MoeForCausalLM", further=lambda _: {"norm_topk_prob": True}),
    "gemma2": _Architecture("Gemma2ForCausalLM", further=lambda file: _gemma(file, 2, 46)),
    "gemma3": _Architecture("Gemma3ForCausalLM", further=_gemma3),
    "gemma3n": _Architecture("Gemma3nForCausalLM", further=_gemma3n),
    "gemma4": _Architecture("Gemma4ForCausalLM", further=_gemma4),
    "phi3": _Architecture("Phi3ForCausalLM"),
    "olmo2": _Architecture("Olmo2ForCausalLM"),
    "granite": _Architecture("GraniteForCausalLM", further=_granite),
    "granitemoe": _Architecture(
        "GraniteMoeForCausalLM",
        further=lambda file: {**_granite(file), "norm_topk_prob": True},
    ),
    "smollm3": _Architecture("SmolLM3ForCausalLM"),
    "starcoder2": _Architecture(
        "Starcoder2ForCausalLM",
        {"rms_norm_eps": "norm_epsilon", "attention_bias": "use_bias", "mlp_bias": "use_bias"},
    ),
    "gpt2": _Architecture(
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
    "gpt-oss": _Architecture("GptOssForCausalLM", further=_gpt_oss),
    "qwen35": _Architecture("Qwen3_5ForCausalLM", further=_delta_net),
    "qwen35moe": _Architecture("Qwen3_5MoeForCausalLM", further=_delta_net),
    "qwen2moe": _Architecture("Qwen2MoeForCausalLM", {"attention_bias": "qkv_bias"}),
    "olmoe": _Architecture("OlmoeForCausalLM"),
    "command-r": _Architecture(
        "CohereForCausalLM", {"rms_norm_eps": "layer_norm_eps"}, further=_cohere
    ),
    "cohere2": _Architecture(
        "Cohere2ForCausalLM", {"rms_norm_eps": "layer_norm_eps"}, further=_cohere
    ),
    "arcee": _Architecture("ArceeForCausalLM"),
    "ernie4_5": _Architecture(
        "Ernie4_5ForCausalLM", {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
    ),
    "qwen3next": _Architecture("Qwen3NextForCausalLM", further=_delta_net),
    "deepseek2": _Architecture("DeepseekV2ForCausalLM", further=_latent),
}
