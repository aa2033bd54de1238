"""Checkpoints with an MTP layer, made of random models of transformers with one layer more."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import MODEL_ARCH_NAMES, GGUFWriter
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import PreTrainedModel

from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.gguf_checkpoints import ARCHITECTURES, write_gguf


class MtpNames(NamedTuple):
    """Names of an MTP layer's tensors; `layer` is the beginning of those of the layer itself."""

    layer: str
    projection: str
    embedding_norm: str
    states_norm: str
    final_norm: str


class MtpParts(NamedTuple):
    """A model with one layer more, and the weights around that layer."""

    whole: PreTrainedModel
    """Model whose last layer is the MTP layer"""
    projection: Tensor
    embedding_norm: Tensor
    states_norm: Tensor
    final_norm: Tensor


FORMATS = {
    "deepseek v3": MtpNames(
        "model.layers.{n}.",
        "model.layers.{n}.eh_proj",
        "model.layers.{n}.enorm",
        "model.layers.{n}.hnorm",
        "model.layers.{n}.shared_head.norm",
    ),
    "qwen3 next": MtpNames(
        "mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
    ),
}
FORMATS["mimo"] = MtpNames(
    "model.mtp_layers.0.",
    *(
        f"model.mtp_layers.0.{name}"
        for name in ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    ),
)
_ARCHITECTURES = {"mimo": ("MiMoForCausalLM", "qwen2, tied")}
"""Architectures that transformers lacks, and the models with the same layers"""
FORMATS["deepseek v3.2"] = FORMATS["glm4 moe"] = FORMATS["deepseek v3"]
FORMATS["qwen3.5"] = FORMATS["qwen3.5 moe"] = FORMATS["qwen3 next"]


def make_mtp(directory: Path, family: str, **changes: Any) -> MtpParts:
    """Write a checkpoint of a family with an MTP layer. changes: other values of its config."""
    architecture, base = _ARCHITECTURES.get(family, ("", family))
    config = {**CONFIGS[base].to_dict(), **changes}
    number = config["num_hidden_layers"]
    more: dict[str, Any] = {"num_hidden_layers": number + 1}
    if config.get("layer_types"):
        more["layer_types"] = [*config["layer_types"], "full_attention"]
    if config.get("mlp_layer_types"):
        more["mlp_layer_types"] = [*config["mlp_layer_types"], config["mlp_layer_types"][-1]]
    make_checkpoint(directory, type(CONFIGS[base])(**{**config, **more}))
    whole = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    names = MtpNames(*(name.format(n=number) for name in FORMATS[family]))
    tensors = load_file(directory / "model.safetensors")
    before = f"model.layers.{number}."
    tensors = {
        names.layer + name.removeprefix(before) if name.startswith(before) else name: tensor
        for name, tensor in tensors.items()
    }
    generator = torch.Generator().manual_seed(5)
    hidden = config["hidden_size"]
    projection = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
    norms = [torch.randn(hidden, generator=generator) * 0.2 for _ in range(3)]
    offset = 0.0 if family.startswith("qwen3") else 1.0
    states_first = family == "mimo"
    stored = projection.roll(hidden, dims=1) if states_first else projection
    tensors[f"{names.projection}.weight"] = stored
    for name, norm in zip(names[2:], norms, strict=True):
        tensors[f"{name}.weight"] = norm + offset
    save_file(tensors, directory / "model.safetensors")
    values = json.loads((directory / "config.json").read_text())
    for key, value in more.items():
        values[key] = value[:-1] if isinstance(value, list) else number
    values["num_nextn_predict_layers"] = 1
    if architecture:
        values["architectures"] = [architecture]
    (directory / "config.json").write_text(json.dumps(values))
    return MtpParts(whole, projection, *(1 + norm for norm in norms))


def write_mtp_gguf(path: Path, parts: MtpParts, *, without: str = "") -> None:
    """Write a GGUF file of a model whose last layer is the MTP layer, as llama.cpp names it.

    without: name of a tensor that the file lacks.
    """
    config = parts.whole.config
    architecture = MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
    tensors = {
        "eh_proj": parts.projection,
        "enorm": parts.embedding_norm,
        "hnorm": parts.states_norm,
        "shared_head_norm": parts.final_norm,
    }

    def add_inputs(writer: GGUFWriter) -> None:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", 1)
        for name, tensor in tensors.items():
            if name != without:
                number = config.num_hidden_layers - 1
                writer.add_tensor(f"blk.{number}.nextn.{name}.weight", tensor.numpy())

    write_gguf(path, parts.whole, further=add_inputs)
