"""Checkpoints with MTP layers, made of random models of transformers with some layers more."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gguf import MODEL_ARCH_NAMES, GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.modeling_utils import PreTrainedModel

from services.engine.model.decoder import Decoder
from services.engine.model.draft_head import DraftHead
from services.engine.model.loader import load_model
from services.engine.model.mtp_head import load_mtp
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.fp8_checkpoints import Layout, set_parameter, write_fp8
from tests.unit.engine.gguf_checkpoints import ARCHITECTURES, write_gguf
from tests.unit.engine.tiny import make_checkpoint as make_tiny


class MtpNames(NamedTuple):
    """Names of an MTP layer's tensors; `layer` is the beginning of those of the layer itself.

    {n}: number behind the model's layers; {k}: number of the MTP layer.
    """

    layer: str
    projection: str
    embedding_norm: str
    states_norm: str
    final_norm: str


class MtpWeights(NamedTuple):
    """Weights around one MTP layer."""

    projection: Tensor
    embedding_norm: Tensor
    states_norm: Tensor
    final_norm: Tensor


class MtpParts(NamedTuple):
    """A model with some layers more, and the weights around these."""

    whole: PreTrainedModel
    """Model whose last layers are the MTP layers"""
    layers: list[MtpWeights]


def _names(layer: str, *around: str) -> MtpNames:
    return MtpNames(layer, *(f"{layer}{name}" for name in around))


FORMATS = {
    "deepseek v3": _names("model.layers.{n}.", "eh_proj", "enorm", "hnorm", "shared_head.norm"),
    "qwen3 next": MtpNames(
        "mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"
    ),
    "mimo": _names(
        "model.mtp_layers.{k}.",
        *("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm"),
    ),
    "mimo v2 flash": _names(
        "model.mtp.layers.{k}.", "eh_proj", "enorm", "hnorm", "final_layernorm"
    ),
}
_ARCHITECTURES = {"mimo": ("MiMoForCausalLM", "qwen2, tied")}
"""Architectures that transformers lacks, and the models with the same layers"""
FORMATS["deepseek v3.2"] = FORMATS["glm4 moe"] = FORMATS["deepseek v3"]
FORMATS["qwen3.5"] = FORMATS["qwen3.5 moe"] = FORMATS["k-exaone"] = FORMATS["qwen3 next"]
FORMATS["exaone4.5"] = FORMATS["qwen3 next"]
FORMATS["glm ocr"] = FORMATS["glm4v moe"] = _names(
    "model.language_model.layers.{n}.", "eh_proj", "enorm", "hnorm", "shared_head.norm"
)


def make_mtp(
    directory: Path, family: str, layers: int = 1, *, own_tables: bool = False, **changes: Any
) -> MtpParts:
    """Write a checkpoint of a family with MTP layers.

    own_tables: the first layer has embeddings and an output projection that are not the model's,
    and each further one a copy of the model's. changes: other values of its config.
    """
    architecture, base = _ARCHITECTURES.get(family, ("", family))
    config = {**CONFIGS[base].to_dict(), **changes}
    has_images = "text_config" in config
    text = config["text_config"] if has_images else config
    number = text["num_hidden_layers"]
    is_windowed = family in ("mimo v2 flash", "exaone4.5") or "mtp_layer_types" in changes
    is_dense = is_windowed or family == "k-exaone"
    more: dict[str, Any] = {"num_hidden_layers": number + layers}
    if text.get("layer_types"):
        kind = "sliding_attention" if is_windowed else "full_attention"
        more["layer_types"] = [*text["layer_types"], *[kind] * layers]
    if text.get("mlp_layer_types"):
        kinds = text["mlp_layer_types"]
        more["mlp_layer_types"] = [*kinds, *["dense" if is_dense else kinds[-1]] * layers]
    longer = {"text_config": {**text, **more}} if has_images else more
    make_checkpoint(directory, type(CONFIGS[base])(**{**config, **longer}))
    auto = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    whole = auto.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    tensors = load_file(directory / "model.safetensors")
    found = [_add_layer(tensors, text, family, number, depth) for depth in range(layers)]
    if own_tables:
        _add_tables(tensors, number, layers)
    save_file(tensors, directory / "model.safetensors")
    values = json.loads((directory / "config.json").read_text())
    shape = values["text_config"] if has_images else values
    for key, value in more.items():
        shape[key] = value[:-layers] if isinstance(value, list) else number
    shape["num_nextn_predict_layers"] = layers
    if architecture:
        values["architectures"] = [architecture]
    (directory / "config.json").write_text(json.dumps(values))
    return MtpParts(whole, found)


def _add_layer(
    tensors: dict[str, Tensor], config: Mapping[str, Any], family: str, number: int, depth: int
) -> MtpWeights:
    """Give the tensors of a layer behind the model's `number` the names of an MTP layer."""
    names = _names_of(family, number, depth)
    before = _name_in_model(family, number + depth)
    for name in [name for name in tensors if name.startswith(before)]:
        own = name.removeprefix(before)
        if family == "mimo v2 flash":
            own = own.replace("post_attention_layernorm", "pre_mlp_layernorm")
        tensors[f"{names.layer}{own}"] = tensors.pop(name)
    generator = torch.Generator().manual_seed(5 + depth)
    hidden = config["hidden_size"]
    projection = torch.randn(hidden, 2 * hidden, generator=generator) * 0.2
    norms = [torch.randn(hidden, generator=generator) * 0.2 for _ in range(3)]
    offset = 0.0 if family.startswith("qwen3") else 1.0
    stored = projection.roll(hidden, dims=1) if family == "mimo" else projection
    tensors[f"{names.projection}.weight"] = stored.contiguous()
    for name, norm in zip(names[2:], norms, strict=True):
        tensors[f"{name}.weight"] = norm + offset
    return MtpWeights(projection, *(1 + norm for norm in norms))


def _names_of(family: str, number: int, depth: int) -> MtpNames:
    """Return the names of a layer. number: number of the model's layers. depth: from 0."""
    return MtpNames(*(name.format(n=number + depth, k=depth) for name in FORMATS[family]))


def _name_in_model(family: str, number: int) -> str:
    """Return the beginning of the names of a layer's tensors in the model of transformers."""
    has_images = hasattr(CONFIGS[_ARCHITECTURES.get(family, ("", family))[1]], "vision_config")
    return f"model.language_model.layers.{number}." if has_images else f"model.layers.{number}."


def quantize_mtp(
    directory: Path, family: str, parts: MtpParts, layout: Layout, left_out: Sequence[str]
) -> None:
    """Rewrite the checkpoint of a single MTP layer as FP8, and give `parts` the rounded weights."""
    number = parts.whole.config.get_text_config().num_hidden_layers - 1
    names = _names_of(family, number, 0)
    parameters = dict(parts.whole.named_parameters())
    for name, weight in write_fp8(directory, layout, left_out).items():
        if name == f"{names.projection}.weight":
            parts.layers[0].projection.copy_(weight)
        elif name.startswith(names.layer):
            own = name.removeprefix(names.layer)
            set_parameter(parameters, _name_in_model(family, number) + own, weight)
        else:
            set_parameter(parameters, name, weight)


def _add_tables(tensors: dict[str, Tensor], number: int, layers: int) -> None:
    """Add tables of their own to layers in DeepSeek's format."""
    for depth in range(layers):
        names = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        for name, of_model in names.items():
            table = tensors[f"{of_model}.weight"]
            own = table.flip(0) if depth == 0 else table.clone()
            tensors[f"model.layers.{number + depth}.{name}.weight"] = own.contiguous()


class MtpPair(NamedTuple):
    """A model and its MTP layers."""

    decoder: Decoder
    head: DraftHead


def load_mtp_pair(directory: Path) -> MtpPair:
    """Load a model that copies its final hidden states, and its MTP layers."""
    decoder = load_model(directory, torch.float32)
    assert isinstance(decoder, Decoder)
    decoder.tap([decoder.spec.num_layers])
    return MtpPair(decoder, load_mtp(directory, decoder, "model"))


def make_tiny_mtp(directory: Path, layers: int, *, counts: bool = False) -> Path:
    """Write a tiny Llama of 3 layers with MTP layers of random weights, in DeepSeek's format.

    counts: the model's most likely next token is the newest one plus 1. The first layer knows this
    from hidden states of the model alone, the next layers from the output of the one before.
    """
    make_tiny(directory)
    tensors = load_file(directory / "model.safetensors")
    vocabulary, hidden = tensors["model.embed_tokens.weight"].shape
    half, generator = hidden // 2, torch.Generator().manual_seed(9)
    config = json.loads((directory / "config.json").read_text())
    below = [name for name in tensors if name.startswith("model.layers.0.")]
    number = config["num_hidden_layers"] = 3  # a model has no fewer layers than MTP layers
    for name in below:
        tensors[name.replace("layers.0.", "layers.2.")] = tensors[name].clone()
    for depth in range(layers):
        prefix = f"model.layers.{number + depth}."
        for name in below:
            random = torch.randn(tensors[name].shape, generator=generator) * 0.3
            whole = random + 1 if name.endswith("norm.weight") else random
            tensors[prefix + name.removeprefix("model.layers.0.")] = whole
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden)
        projection = torch.randn(hidden, 2 * hidden, generator=generator) * 0.3
        tensors[f"{prefix}eh_proj.weight"] = projection
    if counts:
        angles = torch.arange(vocabulary)[:, None] * torch.arange(1, half // 2 + 1)
        angles = angles * (2 * torch.pi / vocabulary)
        code = torch.stack((angles.cos(), angles.sin()), dim=2).flatten(1)
        step = torch.linalg.lstsq(code, code.roll(-1, 0)).solution.T  # the code of the next number
        tensors["model.embed_tokens.weight"] = torch.cat((code, code), dim=1)
        output = torch.cat((code.roll(1, 0), torch.zeros(vocabulary, half)), dim=1)
        tensors["lm_head.weight"] = output.contiguous()
        config["tie_word_embeddings"] = False
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight", "eh_proj.weight")):
                tensor.zero_()
        for depth in range(layers):
            read = hidden if depth else hidden + half
            weight = tensors[f"model.layers.{number + depth}.eh_proj.weight"]
            weight[:half, read : read + half] = step
    save_file(tensors, directory / "model.safetensors")
    config["num_nextn_predict_layers"] = layers
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def write_mtp_gguf(
    path: Path, parts: MtpParts, *, without: str = "", output: Tensor | None = None
) -> None:
    """Write a GGUF file of a model whose last layers are the MTP layers, as llama.cpp names them.

    without: name of a tensor that the file lacks. output: output projection of the first of these
    layers, which then also has a rounded copy of the model's embeddings.
    """
    config = parts.whole.config
    architecture = MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
    names = ("eh_proj", "enorm", "hnorm", "shared_head_norm")
    first = config.num_hidden_layers - len(parts.layers)

    def add_inputs(writer: GGUFWriter) -> None:
        writer.add_uint32(f"{architecture}.nextn_predict_layers", len(parts.layers))
        for number, weights in enumerate(parts.layers, start=first):
            for name, tensor in zip(names, weights, strict=True):
                if name != without:
                    writer.add_tensor(f"blk.{number}.nextn.{name}.weight", tensor.numpy())
        if output is not None:
            table = parts.whole.model.embed_tokens.weight.detach().numpy()
            rounded, name = quantize(table, GGMLQuantizationType.Q4_0), f"blk.{first}.nextn"
            kind = GGMLQuantizationType.Q4_0
            writer.add_tensor(f"{name}.embed_tokens.weight", rounded, raw_dtype=kind)
            writer.add_tensor(f"{name}.shared_head_head.weight", output.numpy())

    write_gguf(path, parts.whole, further=add_inputs)
