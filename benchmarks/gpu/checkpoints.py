"""Random checkpoints of every family, made on the device without transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.manifest import Manifest

__all__ = ["FAMILIES", "LLAMAS", "SHAPES", "make_checkpoint"]

_SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "mistral, window": {"architectures": ["MistralForCausalLM"], "sliding_window": 100},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 64,
        "sliding_window": 100,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 64,
        "sliding_window": 100,
        "sliding_window_pattern": 2,
    },
    "phi3, head of 96": {"architectures": ["Phi3ForCausalLM"], "head_dim": 96},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "granite": {"architectures": ["GraniteForCausalLM"], "attention_multiplier": 0.1},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"]},
    "starcoder2": {"architectures": ["Starcoder2ForCausalLM"], "tie_word_embeddings": True},
    "mixtral": {"architectures": ["MixtralForCausalLM"], **_EXPERTS},
    "qwen3 moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "gpt-oss": {"architectures": ["GptOssForCausalLM"], **_EXPERTS, "sliding_window": 100},
    "qwen3.5, gated delta net": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"] * 2,
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "deepseek v2, latents": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 128,
        "q_lora_rank": 128,
        "v_head_dim": 64,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "head_dim": 32,
    },
}
"""Additional keys of config.json of each small family"""
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "eos_token_id": None,
    "bos_token_id": None,
}
LLAMAS: Mapping[str, dict[str, Any]] = {
    "tiny": _LLAMA
    | {
        "vocab_size": 2000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "head_dim": 16,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    },
    "1b": _LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": _LLAMA
    | {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
    },
}
"""config.json of models with the shapes of Llama 3.2 1B and Llama 3.1 8B, and of a tiny one"""
SHAPES: Mapping[str, dict[str, Any]] = {
    "qwen3 moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    },
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 8,
        "layer_types": [
            "linear_attention",
            "linear_attention",
            "linear_attention",
            "full_attention",
        ]
        * 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "rope_theta": 10000000.0,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    },
    "deepseek v2": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 9,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "q_lora_rank": 1536,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    },
}
"""config.json of shapes with fewer layers: 8 of 48 of Qwen3 30B-A3B, 8 of 32 of Qwen 3.5 9B, 9 of
27 of DeepSeek V2 Lite"""
_FILE_BYTES = 4 << 30
"""Most bytes of a safetensors file"""


def make_checkpoint(
    out: Path, config: Mapping[str, Any], device: torch.device, *, small: bool
) -> Path:
    """Make a checkpoint with random weights in bfloat16, unless it is there.

    small: `config` only adds to the shape of the small families.
    """
    if (out / "config.json").exists():
        return out
    out.mkdir(parents=True, exist_ok=True)
    values = {**_SMALL, **config} if small else dict(config)
    values["dtype"] = "bfloat16"
    spec = ModelSpec.from_config(values)
    generator = torch.Generator(device).manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    files: list[dict[str, torch.Tensor]] = []
    root = next(iter(spec.family.names.roots))
    for stored in Manifest.of(spec, root).tensors():
        weight = torch.randn(stored.shape, generator=generator, device=device)
        if len(stored.shape) == 1:
            weight = weight * 0.1 + (0 if spec.family.norm_offset else 1)
        else:
            weight *= stored.shape[-1] ** -0.5
        tensors[stored.name] = weight.bfloat16().cpu()
        if sum(tensor.nbytes for tensor in tensors.values()) > _FILE_BYTES:
            files.append(tensors)
            tensors = {}
    files.append(tensors)
    _save(out, files)
    (out / "config.json").write_text(json.dumps(values))
    return out


def _save(out: Path, files: list[dict[str, torch.Tensor]]) -> None:
    if len(files) == 1:
        save_file(files[0], out / "model.safetensors")
        return
    placed: dict[str, str] = {}
    for number, tensors in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(tensors, out / name)
        placed |= dict.fromkeys(tensors, name)
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
