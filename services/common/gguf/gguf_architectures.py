"""Architectures of llama.cpp: one row each, with the keys of config.json that only it has."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from services.common.gguf.gguf_cohere import read_cohere, read_cohere_experts
from services.common.gguf.gguf_encoders import read_encoder, read_modern_bert, read_nomic_experts
from services.common.gguf.gguf_experts import read_hunyuan_routing, read_sigmoid_routing
from services.common.gguf.gguf_file import GgufError, GgufFile
from services.common.gguf.gguf_gemma import (
    read_embedding_gemma,
    read_gemma2,
    read_gemma3,
    read_gemma3n,
    read_gemma4,
)
from services.common.gguf.gguf_granite import read_granite, read_granite_hybrid
from services.common.gguf.gguf_laguna import read_laguna
from services.common.gguf.gguf_latent import (
    choose_latent_model,
    read_block_indexes,
    read_indexed,
    read_kimi_linear,
    read_latent,
    read_unsplit_latent,
)
from services.common.gguf.gguf_layers import count_layers, read_delta_net, read_windows
from services.common.gguf.gguf_mimo import read_mimo
from services.common.gguf.gguf_recurrent import (
    read_convolutions,
    read_falcon_h1,
    read_jamba,
    read_lightning,
    read_mamba,
    read_nemotron_h,
    read_selective,
)
from services.common.gguf.gguf_rope import read_rope_scaling
from services.common.json_values import Json

__all__ = ["Architecture", "architecture_of", "is_read"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture of llama.cpp."""

    name: str
    """Name of the architecture in transformers"""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in this architecture of keys of Llama's config.json that it calls otherwise"""
    extra_keys: Callable[[GgufFile], dict[str, Json]] = field(default=lambda _: {})
    """Function that reads the keys that only this architecture has"""
    has_attention: bool = True
    """True if some layers have attention heads"""
    has_layer_heads: bool = False
    """True if layers may differ in their numbers of heads"""


def is_read(name: str) -> bool:
    """Return whether files of an architecture, by llama.cpp's name, are read."""
    return name in _ARCHITECTURES


def architecture_of(file: GgufFile) -> Architecture:
    """Return the architecture of a file. Several architectures may share llama.cpp's name.

    Raises GgufError for an unsupported architecture.
    """
    name = file.architecture
    if name not in _ARCHITECTURES:
        raise GgufError(
            f"{file.path}: the architecture {name} is not supported. Supported: "
            f"{', '.join(_ARCHITECTURES)}."
        )
    if name == "granitemoe" and file.own("expert_shared_feed_forward_length") in file.metadata:
        return _GRANITE_MOE_SHARED
    if name == "llama" and "llama.expert_count" in file.metadata:
        return _MIXTRAL
    if name == "olmo2" and file.integer("olmo2.attention.sliding_window", 0) > 0:
        return _OLMO3
    if name == "mamba" and file.flag("mamba.ssm.dt_b_c_rms", False):
        return _FALCON_MAMBA
    if name == "deepseek2":
        return replace(_ARCHITECTURES[name], name=choose_latent_model(file))
    return _ARCHITECTURES[name]


def _read_mellum(file: GgufFile) -> dict[str, Json]:
    base = file.positive(file.own("rope.freq_base"), 10000.0)
    return {
        **read_windows(file, 4),
        "norm_topk_prob": True,
        "rope_local_base_freq": file.positive(file.own("rope.freq_base_swa"), base),
    }


def _read_gpt_oss(file: GgufFile) -> dict[str, Json]:
    # OpenAI's own code does not round the ends of YaRN's ramp
    return {"rope_scaling": {**read_rope_scaling(file), "truncate": False}}


def _read_olmo3(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Olmo 3, whose layers with a window rotate without scaling."""
    base = file.positive("olmo2.rope.freq_base", 10000.0)
    local = file.positive("olmo2.rope.freq_base_swa", base)
    return {
        **read_windows(file, 4),
        "rope_parameters": {
            "full_attention": {**read_rope_scaling(file), "rope_theta": base},
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
        },
    }


def _read_apertus(file: GgufFile) -> dict[str, Json]:
    """Return the constants of xIELU, a list of one per layer for each."""
    return {f"xielu_{name}": [*file.numbers(f"xielu.{name}")] for name in _XIELU}


def _read_stablelm(file: GgufFile) -> dict[str, Json]:
    # the file's own use_parallel_residual is true wherever the checkpoint has no such key
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.tensors,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _read_output_bias(file: GgufFile) -> dict[str, Json]:
    return {"lm_head_bias": "output.bias" in file.tensors}


def _read_ernie_experts(file: GgufFile) -> dict[str, Json]:
    """Return the keys of ERNIE's experts.

    The number of shared experts is needed because the file gives the width of one.
    """
    return {
        "moe_layer_start_index": file.count(file.own("leading_dense_block_count"), 0, least=0),
        "moe_layer_interval": file.count(file.own("interleave_moe_layer_step"), 1),
        "moe_num_shared_experts": file.count(file.own("expert_shared_count"), 0, least=0),
    }


def _read_llama4(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Llama 4, with constants of llama.cpp's code that the file leaves out.

    A window of 0 marks a model without chunks, all of whose layers rotate. The model with 128
    experts has no norms of queries and keys.
    """
    values: dict[str, Json] = {
        "interleave_moe_layer_step": file.count("llama4.interleave_moe_layer_step", 1),
        "use_qk_norm": file.integer("llama4.expert_count", 0) != _MAVERICK_EXPERTS,
    }
    if file.integer("llama4.attention.sliding_window", 1) == 0:
        values |= {"attention_chunk_size": None, "no_rope_layers": [1] * count_layers(file)}
    return values


def _read_falcon(file: GgufFile) -> dict[str, Json]:
    """Return the keys of Falcon, which has two norms, several key heads, or neither."""
    has_both = "blk.0.attn_norm_2.weight" in file.tensors
    key_heads = file.integers("falcon.attention.head_count_kv", 1, 1)[0]
    return {
        "new_decoder_architecture": has_both or key_heads > 1,
        "num_ln_in_parallel_attn": 2 if has_both else 1,
    }


def _read_clip(file: GgufFile) -> dict[str, Json]:
    return {"clip_qkv": _positive_or_none(file, file.own("attention.clamp_kqv"))}


def _read_mpt(file: GgufFile) -> dict[str, Json]:
    """Return the keys of MPT's attention. A largest bias of 0 marks a model without ALiBi."""
    bias = _positive_or_none(file, "mpt.attention.max_alibi_bias")
    return {**_read_clip(file), "alibi": bias is not None, "alibi_bias_max": bias}


def _positive_or_none(file: GgufFile, key: str) -> float | None:
    """Return a number above 0; None if it is 0 or missing. Raises GgufError for a negative one."""
    return file.positive(key) if file.number(key, 0.0) else None


_MAVERICK_EXPERTS = 128


def _read_glm_experts(file: GgufFile) -> dict[str, Json]:
    has_norms = "blk.0.attn_q_norm.weight" in file.tensors
    return {**read_sigmoid_routing(file), "use_qk_norm": has_norms}


_XIELU = ("alpha_p", "alpha_n", "beta", "eps")
_USE_BIAS = {"attention_bias": "use_bias", "mlp_bias": "use_bias"}
_GPT2_KEYS = {
    "hidden_size": "n_embd",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "rms_norm_eps": "layer_norm_epsilon",
}
_DEEPSEEK_KEYS = {
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_num_shared_experts": "n_shared_experts",
    "num_local_experts": "n_routed_experts",
}
_EXAONE_KEYS = {
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_num_shared_experts": "num_shared_experts",
    "num_local_experts": "num_experts",
}
_HUNYUAN_KEYS = {**_EXAONE_KEYS, "routed_scaling_factor": "router_scaling_factor"}
_KIMI_KEYS = {
    "max_position_embeddings": "model_max_length",
    "moe_layer_start_index": "first_k_dense_replace",
    "moe_num_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "num_local_experts": "num_experts",
}
_MAMBA_KEYS = {
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_d_state": "state_size",
    "mamba_expand": "expand",
    "mamba_proj_bias": "use_bias",
    "rms_norm_eps": "layer_norm_epsilon",
}
_MAMBA = Architecture(
    "MambaForCausalLM",
    {**_MAMBA_KEYS, "mamba_d_ssm": "intermediate_size", "mamba_dt_rank": "time_step_rank"},
    read_selective,
    has_attention=False,
)
_FALCON_MAMBA = replace(
    _MAMBA,
    name="FalconMambaForCausalLM",
    extra_keys=lambda file: {
        **read_selective(file),
        # llama.cpp has one epsilon for all norms
        "mixer_rms_eps": file.number("mamba.attention.layer_norm_rms_epsilon"),
    },
)
_OLMO3 = Architecture("Olmo3ForCausalLM", extra_keys=_read_olmo3)
_GRANITE_MOE = Architecture(
    "GraniteMoeForCausalLM",
    extra_keys=lambda file: {**read_granite(file), "norm_topk_prob": True},
)
_GRANITE_MOE_SHARED = replace(
    _GRANITE_MOE,
    name="GraniteMoeSharedForCausalLM",
    names={"shared_expert_intermediate_size": "shared_intermediate_size"},
)
_MIXTRAL = Architecture("MixtralForCausalLM", extra_keys=lambda _: {"norm_topk_prob": True})
_ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM"),
    "internlm2": Architecture("LlamaForCausalLM"),
    "mistral3": Architecture("Ministral3ForCausalLM"),
    "qwen2": Architecture("Qwen2ForCausalLM"),
    "qwen2vl": Architecture("Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3ForCausalLM"),
    "qwen3vl": Architecture("Qwen3ForCausalLM"),
    **dict.fromkeys(
        ("qwen3moe", "qwen3vlmoe"),
        Architecture("Qwen3MoeForCausalLM", extra_keys=lambda _: {"norm_topk_prob": True}),
    ),
    "gemma": Architecture("GemmaForCausalLM"),
    "jais2": Architecture("Jais2ForCausalLM", {"rms_norm_eps": "layer_norm_eps"}),
    "gemma2": Architecture("Gemma2ForCausalLM", extra_keys=read_gemma2),
    "gemma3": Architecture("Gemma3ForCausalLM", extra_keys=read_gemma3),
    "gemma3n": Architecture("Gemma3nForCausalLM", extra_keys=read_gemma3n),
    "gemma4": Architecture("Gemma4ForCausalLM", extra_keys=read_gemma4),
    "phi3": Architecture("Phi3ForCausalLM"),
    "olmo2": Architecture("Olmo2ForCausalLM"),
    "granite": Architecture("GraniteForCausalLM", extra_keys=read_granite),
    "granitemoe": _GRANITE_MOE,
    "granitehybrid": Architecture("GraniteMoeHybridForCausalLM", extra_keys=read_granite_hybrid),
    **dict.fromkeys(
        ("nemotron_h", "nemotron_h_moe"),
        Architecture(
            "NemotronHForCausalLM",
            {
                "num_local_experts": "n_routed_experts",
                "rms_norm_eps": "layer_norm_epsilon",
                "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
            },
            extra_keys=read_nemotron_h,
        ),
    ),
    "mamba2": Architecture(
        "Mamba2ForCausalLM",
        {
            **_MAMBA_KEYS,
            "mamba_d_head": "head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_n_heads": "num_heads",
        },
        read_mamba,
        has_attention=False,
    ),
    "mamba": _MAMBA,
    "jamba": Architecture("JambaForCausalLM", extra_keys=read_jamba),
    "falcon-h1": Architecture("FalconH1ForCausalLM", extra_keys=read_falcon_h1),
    "smollm3": Architecture("SmolLM3ForCausalLM"),
    "starcoder2": Architecture(
        "Starcoder2ForCausalLM",
        {"rms_norm_eps": "norm_epsilon", **_USE_BIAS},
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        _GPT2_KEYS,
    ),
    "starcoder": Architecture(
        "GPTBigCodeForCausalLM",
        _GPT2_KEYS,
        lambda file: {"multi_query": file.integers("starcoder.attention.head_count_kv", 1)[0] == 1},
    ),
    "falcon": Architecture(
        "FalconForCausalLM",
        {
            "attention_bias": "bias",
            "intermediate_size": "ffn_hidden_size",
            "mlp_bias": "bias",
            "num_key_value_heads": "num_kv_heads",
            "rms_norm_eps": "layer_norm_epsilon",
        },
        _read_falcon,
    ),
    "bloom": Architecture(
        "BloomForCausalLM",
        {"max_position_embeddings": "seq_length", "rms_norm_eps": "layer_norm_epsilon"},
    ),
    "mpt": Architecture(
        "MptForCausalLM",
        {"max_position_embeddings": "max_seq_len", "rms_norm_eps": "layer_norm_epsilon"},
        _read_mpt,
    ),
    "dbrx": Architecture(
        "DbrxForCausalLM",
        {
            "intermediate_size": "ffn_hidden_size",
            "max_position_embeddings": "max_seq_len",
            "num_experts_per_tok": "moe_top_k",
            "num_key_value_heads": "kv_n_heads",
            "num_local_experts": "moe_num_experts",
        },
        _read_clip,
    ),
    "gpt-oss": Architecture("GptOssForCausalLM", extra_keys=_read_gpt_oss),
    "qwen35": Architecture("Qwen3_5ForCausalLM", extra_keys=read_delta_net),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", extra_keys=read_delta_net),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", {"attention_bias": "qkv_bias"}),
    "olmoe": Architecture("OlmoeForCausalLM"),
    "command-r": Architecture(
        "CohereForCausalLM", {"rms_norm_eps": "layer_norm_eps"}, extra_keys=read_cohere
    ),
    "cohere2": Architecture(
        "Cohere2ForCausalLM", {"rms_norm_eps": "layer_norm_eps"}, extra_keys=read_cohere
    ),
    "cohere2moe": Architecture(
        "Cohere2MoeForCausalLM",
        {
            "intermediate_size": "prefix_dense_intermediate_size",
            "moe_intermediate_size": "intermediate_size",
            "moe_layer_start_index": "first_k_dense_replace",
            "moe_num_shared_experts": "num_shared_experts",
            "num_local_experts": "num_experts",
        },
        read_cohere_experts,
    ),
    "laguna": Architecture(
        "LagunaForCausalLM",
        {
            "num_local_experts": "num_experts",
            "routed_scaling_factor": "moe_routed_scaling_factor",
        },
        read_laguna,
        has_layer_heads=True,
    ),
    "arcee": Architecture("ArceeForCausalLM"),
    "ernie4_5": Architecture("Ernie4_5ForCausalLM", _USE_BIAS),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        {**_USE_BIAS, "num_local_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
        extra_keys=_read_ernie_experts,
    ),
    "chatglm": Architecture("GlmForCausalLM"),
    "glm4": Architecture("Glm4ForCausalLM"),
    "exaone4": Architecture("Exaone4ForCausalLM", extra_keys=lambda file: read_windows(file, 4)),
    "seed_oss": Architecture("SeedOssForCausalLM"),
    "hunyuan-dense": Architecture("HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture("HunYuanMoEV1ForCausalLM", {"num_experts_per_tok": "moe_topk"}),
    "apertus": Architecture("ApertusForCausalLM", extra_keys=_read_apertus),
    "nemotron": Architecture("NemotronForCausalLM", {"rms_norm_eps": "norm_eps"}),
    "gptneox": Architecture(
        "GPTNeoXForCausalLM",
        {
            "partial_rotary_factor": "rotary_pct",
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
        },
        extra_keys=lambda file: {
            "use_parallel_residual": file.flag("gptneox.use_parallel_residual", True)
        },
    ),
    "phi2": Architecture(
        "PhiForCausalLM", {"rms_norm_eps": "layer_norm_eps"}, extra_keys=_read_output_bias
    ),
    "phimoe": Architecture("PhimoeForCausalLM", extra_keys=_read_output_bias),
    "stablelm": Architecture(
        "StableLmForCausalLM",
        {"attention_bias": "use_qkv_bias", "rms_norm_eps": "layer_norm_eps"},
        extra_keys=_read_stablelm,
    ),
    "qwen3next": Architecture("Qwen3NextForCausalLM", extra_keys=read_delta_net),
    "deepseek2": Architecture("DeepseekV2ForCausalLM", _DEEPSEEK_KEYS, read_latent),
    "deepseek32": Architecture("DeepseekV32ForCausalLM", _DEEPSEEK_KEYS, read_indexed),
    "glm-dsa": Architecture("GlmMoeDsaForCausalLM", _DEEPSEEK_KEYS, read_indexed),
    "minicpm3": Architecture("MiniCPM3ForCausalLM", extra_keys=read_unsplit_latent),
    "kimi-linear": Architecture("KimiLinearForCausalLM", _KIMI_KEYS, read_kimi_linear),
    "hy_v3": Architecture("HYV3ForCausalLM", _HUNYUAN_KEYS, read_hunyuan_routing),
    "dots1": Architecture("Dots1ForCausalLM", _DEEPSEEK_KEYS, read_sigmoid_routing),
    "exaone-moe": Architecture(
        "ExaoneMoeForCausalLM",
        _EXAONE_KEYS,
        lambda file: {**read_sigmoid_routing(file), **read_windows(file, 4)},
    ),
    "minimax-01": Architecture("MiniMaxForCausalLM", extra_keys=read_lightning),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM",
        extra_keys=lambda file: {**read_sigmoid_routing(file), "norm_topk_prob": True},
    ),
    "mimo2": Architecture(
        "MiMoV2FlashForCausalLM", {"num_local_experts": "n_routed_experts"}, read_mimo
    ),
    "mellum": Architecture("MellumForCausalLM", extra_keys=_read_mellum),
    "minimax-m3": Architecture(
        "MiniMaxM3VLForCausalLM",
        {
            "intermediate_size": "dense_intermediate_size",
            "moe_intermediate_size": "intermediate_size",
        },
        read_block_indexes,
    ),
    "mistral4": Architecture("Mistral4ForCausalLM", _DEEPSEEK_KEYS, read_latent),
    "afmoe": Architecture(
        "AfmoeForCausalLM",
        {
            "moe_layer_start_index": "num_dense_layers",
            "moe_num_shared_experts": "num_shared_experts",
            "num_local_experts": "num_experts",
            "routed_scaling_factor": "route_scale",
            "sliding_window_pattern": "global_attn_every_n_layers",
        },
        lambda file: {**read_sigmoid_routing(file), **read_windows(file, 4), "mup_enabled": True},
    ),
    "llama4": Architecture(
        "Llama4ForCausalLM",
        {
            "intermediate_size": "intermediate_size_mlp",
            "moe_intermediate_size": "intermediate_size",
        },
        _read_llama4,
    ),
    "glm4moe": Architecture("Glm4MoeForCausalLM", _DEEPSEEK_KEYS, _read_glm_experts),
    "bert": Architecture("BertModel", {"rms_norm_eps": "layer_norm_eps"}, read_encoder),
    "nomic-bert": Architecture("NomicBertModel", {"rms_norm_eps": "layer_norm_eps"}, read_encoder),
    "nomic-bert-moe": Architecture(
        "NomicBertModel",
        {
            **_GPT2_KEYS,
            "attention_bias": "qkv_proj_bias",
            "mlp_bias": "mlp_fc1_bias",
            "num_experts_per_tok": "moe_top_k",
            "rope_theta": "rotary_emb_base",
        },
        read_nomic_experts,
    ),
    "jina-bert-v2": Architecture("JinaBertModel", {"rms_norm_eps": "layer_norm_eps"}, read_encoder),
    "jina-bert-v3": Architecture(
        "JinaEmbeddingsV3Model", {"rms_norm_eps": "layer_norm_eps"}, read_encoder
    ),
    "modern-bert": Architecture(
        "ModernBertModel",
        {"rms_norm_eps": "norm_eps", "sliding_window": "local_attention"},
        read_modern_bert,
    ),
    "eurobert": Architecture("EuroBertModel"),
    "gemma-embedding": Architecture("Gemma3TextModel", extra_keys=read_embedding_gemma),
    "lfm2": Architecture(
        "Lfm2ForCausalLM", {"rms_norm_eps": "norm_eps"}, extra_keys=read_convolutions
    ),
    "lfm2moe": Architecture(
        "Lfm2MoeForCausalLM", {"rms_norm_eps": "norm_eps"}, extra_keys=read_convolutions
    ),
}
