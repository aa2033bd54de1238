"""FP8 checkpoints: every layout of scales, and what is wrong with one."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.loader import load_model
from tests.unit.engine.checkpoints import (
    SHAPE,
    WIDE,
    Driver,
    make_checkpoint,
    random_tokens,
    reference_logits,
)

FP8 = torch.float8_e4m3fn
TOKENS = 40
Q = "model.layers.1.self_attn.q_proj.weight"
LEFT_OUT = ("embed_tokens", "lm_head", "mlp.gate.", "layers.0.")
BLOCK = (24, 40)
"""Divides no width of the models, as 128 x 128 need not"""
CHANNELS = {"format": "float-quantized", "ignore": ["lm_head", "re:.*layers.0.*"]}


def of_tensor(weight: Tensor) -> Tensor:
    return weight.abs().max() / 448


def of_channels(weight: Tensor) -> Tensor:
    return weight.abs().amax(dim=1, keepdim=True) / 448


def of_blocks(weight: Tensor) -> Tensor:
    rows, columns = (-(-size // part) for size, part in zip(weight.shape, BLOCK, strict=True))
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = weight[row * BLOCK[0] :, column * BLOCK[1] :][: BLOCK[0], : BLOCK[1]]
            scales[row, column] = of_tensor(block)
    return scales


def spread(blocks: Tensor, shape: torch.Size) -> Tensor:
    repeated = blocks.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    return repeated[: shape[0], : shape[1]]


LAYOUTS: dict[str, tuple[dict[str, object], str, Callable[[Tensor], Tensor]]] = {
    "tensors": ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", of_tensor),
    "blocks": (
        {"quant_method": "fp8", "weight_block_size": list(BLOCK), "modules_to_not_convert": []},
        "_scale_inv",
        of_blocks,
    ),
    "channels": ({"quant_method": "compressed-tensors", **CHANNELS}, "_scale", of_channels),
    "compressed tensors": (
        {"quant_method": "compressed-tensors", **CHANNELS},
        "_scale",
        lambda weight: of_tensor(weight)[None],
    ),
}


def quantize(directory: Path, model: PreTrainedModel, layout: str) -> None:
    """Rewrite the checkpoint as FP8, and give the model the rounded weights."""
    quantization, suffix, scale_of = LAYOUTS[layout]
    file = directory / "model.safetensors"
    tensors, parameters = load_file(file), dict(model.named_parameters())
    for name, weight in list(tensors.items()):
        if weight.ndim != 2 or any(part in name for part in LEFT_OUT):
            continue
        scale = scale_of(weight)
        factor = spread(scale, weight.shape) if scale_of is of_blocks else scale
        tensors[name] = (weight / factor).to(FP8)
        tensors[f"{name}{suffix}"] = scale
        tensors[name.removesuffix("weight") + "input_scale"] = torch.ones(1)
        set_parameter(parameters, name, tensors[name].float() * factor)
    save_file(tensors, file)
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(config))


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


CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3 moe": Qwen3MoeConfig(
        **WIDE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_the_stored_numbers_times_their_scales(
    layout: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that the checkpoint leaves out of the quantization stay as they are."""
    model = make_checkpoint(tmp_path, CONFIGS[family])
    quantize(tmp_path, model, layout)
    with caplog.at_level(logging.INFO):
        decoder = load_model(tmp_path, torch.float32)
    assert "FP8" in caplog.text
    tokens = random_tokens(TOKENS, 1)
    driver = Driver(decoder, [tokens])
    driver.step([(0, TOKENS)])
    torch.testing.assert_close(driver.logits[0], reference_logits(model, tokens), atol=1e-4, rtol=0)


def edit(path: Path, name: str, tensor: Tensor | None) -> None:
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(name)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, file)


def edit_config(path: Path, **values: object) -> None:
    file = path / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= values
    file.write_text(json.dumps(config))


DEFECTS: list[tuple[str, Callable[[Path], object], list[str]]] = [
    ("tensors", lambda p: edit(p, f"{Q}_scale", None), [f"{Q}_scale"]),
    ("tensors", lambda p: edit(p, f"{Q}_scale", torch.ones(3)), [f"{Q}_scale", "[3]"]),
    ("channels", lambda p: edit(p, f"{Q}_scale", torch.ones(63, 1)), ["[63, 1]", "[64, 1]"]),
    ("blocks", lambda p: edit(p, f"{Q}_scale_inv", torch.ones(1, 1)), ["[1, 1]", "[3, 2]"]),
    ("blocks", lambda p: edit(p, f"{Q}_scale_inv", torch.ones(3, 2).long()), ["_inv", "I64"]),
    ("blocks", lambda p: edit_config(p, weight_block_size=[0, 8]), ["weight_block_size", "0"]),
    ("tensors", lambda p: edit_config(p, quant_method="gptq"), ["gptq", "fp8", "mxfp4"]),
    ("tensors", lambda p: edit(p, Q, torch.ones(64, 64).to(torch.float8_e5m2)), [Q, "F8_E5M2"]),
    (
        "channels",
        lambda p: edit_config(p, format="pack-quantized"),
        ["pack-quantized", "float-quantized"],
    ),
]


@pytest.mark.parametrize(("layout", "damage", "named"), DEFECTS)
def test_wrong_scales_and_methods_are_refused(
    layout: str, damage: Callable[[Path], object], named: list[str], tmp_path: Path
) -> None:
    quantize(tmp_path, make_checkpoint(tmp_path, CONFIGS["llama"]), layout)
    damage(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        load_model(tmp_path, torch.float32)
    message = str(refusal.value)
    assert message.endswith(".")
    assert "\n" not in message
    for part in named:
        assert part in message
