"""Checkpoints rewritten in FP8, with every layout of scales."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

__all__ = [
    "FP8",
    "LAYOUTS",
    "LEFT_OUT",
    "Layout",
    "in_blocks",
    "quantize",
    "set_parameter",
    "write_fp8",
]

FP8 = torch.float8_e4m3fn
LEFT_OUT = ("embed_tokens", "lm_head", "mlp.gate.", "layers.0.")
CHANNELS = {"format": "float-quantized", "ignore": ["lm_head", "re:.*layers.0.*"]}


def of_tensor(weight: Tensor) -> Tensor:
    return weight.abs().max() / 448


def of_channels(weight: Tensor) -> Tensor:
    return weight.abs().amax(dim=1, keepdim=True) / 448


def of_blocks(weight: Tensor, block: tuple[int, int]) -> Tensor:
    rows, columns = (-(-size // part) for size, part in zip(weight.shape, block, strict=True))
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            part = weight[row * block[0] :, column * block[1] :][: block[0], : block[1]]
            scales[row, column] = of_tensor(part)
    return scales


def spread(scales: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    repeated = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return repeated[: shape[0], : shape[1]]


@dataclass(frozen=True)
class Layout:
    """Where the scales of a checkpoint stand, and what they are of."""

    quantization: dict[str, object]
    suffix: str
    scale_of: Callable[[Tensor], Tensor] | None
    """None: of blocks"""
    block: tuple[int, int] = (1, 1)


def in_blocks(*block: int) -> Layout:
    quantization: dict[str, object] = {"quant_method": "fp8", "weight_block_size": list(block)}
    quantization["modules_to_not_convert"] = []
    return Layout(quantization, "_scale_inv", None, (block[0], block[1]))


LAYOUTS = {
    "tensors": Layout({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", of_tensor),
    # divides no width of the models, as 128 x 128 need not
    "blocks": in_blocks(24, 40),
    "channels": Layout({"quant_method": "compressed-tensors", **CHANNELS}, "_scale", of_channels),
    "compressed tensors": Layout(
        {"quant_method": "compressed-tensors", **CHANNELS},
        "_scale",
        lambda weight: of_tensor(weight)[None],
    ),
}


def quantize(directory: Path, model: PreTrainedModel, layout: Layout) -> None:
    """Rewrite the checkpoint as FP8, and give the model the rounded weights."""
    parameters = dict(model.named_parameters())
    for name, weight in write_fp8(directory, layout, LEFT_OUT).items():
        set_parameter(parameters, name, weight)


def write_fp8(directory: Path, layout: Layout, left_out: Sequence[str]) -> dict[str, Tensor]:
    """Rewrite the matrices of a checkpoint as FP8. Return the rounded weights by name.

    left_out: parts of the names of tensors that stay as they are.
    """
    file = directory / "model.safetensors"
    tensors, rounded = load_file(file), {}
    for name, weight in list(tensors.items()):
        if weight.ndim != 2 or any(part in name for part in left_out):
            continue
        if layout.scale_of is None:
            scale = of_blocks(weight, layout.block)
            factor = spread(scale, layout.block, weight.shape)
        else:
            scale = factor = layout.scale_of(weight)
        tensors[name] = (weight / factor).to(FP8)
        tensors[f"{name}{layout.suffix}"] = scale
        tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        rounded[name] = tensors[name].float() * factor
    save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = layout.quantization
    (directory / "config.json").write_text(json.dumps(config))
    return rounded


def set_parameter(parameters: dict[str, torch.nn.Parameter], name: str, weight: Tensor) -> None:
    """Write to the model, which stacks the experts of a layer."""
    if name in parameters:
        parameters[name].data.copy_(weight)
        return
    prefix, _, rest = name.partition(".experts.")
    number, projection, _ = rest.split(".")
    if projection == "down_proj":
        parameters[f"{prefix}.experts.down_proj"].data[int(number)] = weight
        return
    both = parameters[f"{prefix}.experts.gate_up_proj"].data[int(number)]
    both.chunk(2)[projection == "up_proj"].copy_(weight)
