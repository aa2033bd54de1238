"""FP8 checkpoints: every layout of scales, and what is wrong with one."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3MoeConfig

from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.loader import load_model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.checkpoints.shapes import SHAPE, WIDE
from tests.unit.engine.fp8_checkpoints import LAYOUTS, quantize

TOKENS = 40
Q = "model.layers.1.self_attn.q_proj.weight"


MODELS = {
    "llama": LlamaConfig(**SHAPE),
    "glm4 moe lite": CONFIGS["glm4 moe lite"],
    "deepseek v3.2": CONFIGS["deepseek v3.2"],
    "longcat flash": CONFIGS["longcat flash"],
    "mimo v2 flash": CONFIGS["mimo v2 flash"],
    "qwen3 moe": Qwen3MoeConfig(
        **WIDE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_the_stored_numbers_times_their_scales(
    layout: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that the checkpoint leaves out of the quantization stay as they are."""
    model = make_checkpoint(tmp_path, MODELS[family])
    quantize(tmp_path, model, LAYOUTS[layout])
    with caplog.at_level(logging.WARNING):
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
    ("tensors", lambda p: edit_config(p, quant_method="aqlm"), ["aqlm", "fp8", "mxfp4"]),
    ("tensors", lambda p: edit(p, Q, torch.ones(64, 64).to(torch.float8_e5m2)), [Q, "F8_E5M2"]),
]


@pytest.mark.parametrize(("layout", "damage", "named"), DEFECTS)
def test_wrong_scales_and_methods_are_refused(
    layout: str, damage: Callable[[Path], object], named: list[str], tmp_path: Path
) -> None:
    quantize(tmp_path, make_checkpoint(tmp_path, CONFIGS["llama"]), LAYOUTS[layout])
    damage(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        load_model(tmp_path, torch.float32)
    message = str(refusal.value)
    assert message.endswith(".")
    assert "\n" not in message
    for part in named:
        assert part in message
