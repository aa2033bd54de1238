"""Random models of transformers, saved as checkpoints, and their logits."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    GemmaConfig,
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    NemotronConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.auto.modeling_auto import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from tests.unit.engine.checkpoints.configs import CONFIGS

_WITH_OFFSETS = (
    RecurrentGemmaConfig,
    GemmaConfig,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma3Config,
    MiniMaxM3VLConfig,
    MiniMaxM3VLTextConfig,
    Qwen3NextConfig,
    Qwen3_5Config,
    Qwen3_5TextConfig,
    Qwen3_5MoeTextConfig,
    NemotronConfig,
)
"""Families that store norms minus one"""


_PUBLISHED = {
    "kimi_linear": (r"block_sparse_moe\.(?=(gate|up|down)_proj)", "mlp."),
    "olmo_hybrid": (r"(\.[13]\.)feedforward_layer_norm", r"\1post_attention_layernorm"),
}
"""Patterns of names that transformers writes, and the names in published files"""


def make_checkpoint(
    directory: Path, config: PreTrainedConfig, *, shard: str = "1GB"
) -> PreTrainedModel:
    """Save a model with random weights, norms and biases; return it as the reference."""
    torch.manual_seed(3)
    model = _new_model(config)
    is_offset = isinstance(config, _WITH_OFFSETS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5).sub_(1 if is_offset else 0)
            elif not parameter.any():  # Gemma 3's projector
                parameter.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("layer_scalar", "std_scale", "std_bias")):
                buffer.uniform_(0.5, 1.5)
            elif name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.uniform_(0, 0.5)
            elif name.endswith("tid2eid"):
                buffer.copy_(torch.rand(len(buffer), 8).argsort(dim=1)[:, : buffer.shape[1]])
            elif name.endswith(("put_min", "put_max")):  # bounds of Gemma 4's clipped products
                buffer.fill_(-2 if name.endswith("min") else 2)
    model.eval().save_pretrained(directory, max_shard_size=shard)  # type: ignore[no-untyped-call]
    if (names := _PUBLISHED.get(config.model_type)) is not None:
        file = directory / "model.safetensors"
        tensors = load_file(file)
        save_file({re.sub(*names, name): tensors[name] for name in tensors}, file)
    return model


def _new_model(config: PreTrainedConfig) -> PreTrainedModel:
    if isinstance(config, Mistral4Config):  # transformers counts it among vision-language models
        config._attn_implementation = "eager"
        return Mistral4ForCausalLM(config)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config, attn_implementation="eager")  # type: ignore[no-untyped-call]
    return model


def make_packed_checkpoint(
    directory: Path, config: PreTrainedConfig = CONFIGS["gpt-oss"]
) -> PreTrainedModel:
    """Save gpt-oss with MXFP4 experts; return the reference, decoded by transformers."""
    model = make_checkpoint(directory, config)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    generator = torch.Generator().manual_seed(5)
    parameters = dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        groups = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(121, 126, groups, generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        numbers = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        parameters[name].data.copy_(numbers)
    save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    return model


@torch.no_grad()
def reference_logits(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return transformers' logits [len(tokens), vocabulary]."""
    logits: Tensor = model(tokens[None]).logits[0]
    return logits
