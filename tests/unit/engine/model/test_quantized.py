"""Quantized checkpoints of the Hugging Face hub: every format, and what is wrong with one."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, LlamaConfig, Phi3Config, Qwen3MoeConfig

from services.common.settings import StartupError
from services.engine.kernels.library import InstructionSet, instruction_set
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.loader import load_model
from services.engine.model.model import Model
from services.engine.start_check import gpu_memory_by_weights, stored_weights
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.checkpoints.shapes import LATENT, SHAPE, WIDE
from tests.unit.engine.quantized_checkpoints import FORMATS, quantize

TOKENS = 40
Q = "model.layers.1.self_attn.q_proj"
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "phi3": Phi3Config(**SHAPE),
    "deepseek v3": DeepseekV3Config(
        **LATENT | {"q_lora_rank": 32, "v_head_dim": 16, "qk_rope_head_dim": 16},
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
    "qwen3 moe": Qwen3MoeConfig(
        **WIDE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


def logits_of(decoder: Model, tokens: Tensor) -> Tensor:
    driver = Driver(decoder, [tokens])
    driver.step([(0, TOKENS)])
    return driver.logits[0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", FORMATS)
def test_weights_are_those_of_the_formats_own_library(
    name: str, family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Layers that the checkpoint leaves out of the quantization stay as they are."""
    if family != "llama" and name not in ("gptq", "awq", "int4 by groups"):
        return
    model = make_checkpoint(tmp_path, FAMILIES[family])
    quantize(tmp_path, model, FORMATS[name])
    tokens = random_tokens(TOKENS, 1)
    expected = reference_logits(model, tokens)
    with caplog.at_level(logging.WARNING):
        ours = logits_of(load_model(tmp_path, torch.float32, weights="decoded"), tokens)
    assert "decoding the quantized weights" in caplog.text
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
    kept = logits_of(load_model(tmp_path, torch.float32), tokens)
    assert (kept - expected).abs().mean() < 0.05 * expected.std()


@pytest.mark.parametrize("name", FORMATS)
def test_decoded_weights_take_the_memory_that_the_start_check_states(
    name: str, tmp_path: Path
) -> None:
    """A byte may hold two codes. `tokenwire show` and the check of memory state these bytes."""
    model = make_checkpoint(tmp_path, FAMILIES["llama"])
    whole = stored_weights(tmp_path).num_bytes("decoded", 2)
    quantize(tmp_path, model, FORMATS[name])
    decoded = stored_weights(tmp_path).num_bytes("decoded", 2)
    # scales and zero points in floating point count, too
    assert whole <= decoded < 1.1 * whole
    assert gpu_memory_by_weights(tmp_path)["decoded"] >= whole


@pytest.mark.skipif(
    instruction_set() in (None, InstructionSet.BASELINE),
    reason="the codes are decoded at loading here",
)
@pytest.mark.parametrize(("name", "share"), [("awq", 0.45), ("int8 by channels", 0.5)])
def test_codes_stay_as_small_in_memory(name: str, share: float, tmp_path: Path) -> None:
    shape = SHAPE | {"num_hidden_layers": 4, "intermediate_size": 256}
    quantize(tmp_path, make_checkpoint(tmp_path, LlamaConfig(**shape)), FORMATS[name])
    decoded = load_model(tmp_path, torch.float32, weights="decoded").weight_bytes
    assert load_model(tmp_path, torch.float32).weight_bytes < share * decoded


@pytest.mark.parametrize("weights", ["int4", "int8", "fp8"])
def test_weights_are_not_rounded_twice(weights: str, tmp_path: Path) -> None:
    quantize(tmp_path, make_checkpoint(tmp_path, FAMILIES["llama"]), FORMATS["awq"])
    with pytest.raises(StartupError, match=f"--weights {weights}"):
        load_model(tmp_path, torch.float32, weights=weights)


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
    ("gptq", lambda p: edit(p, f"{Q}.scales", None), [f"{Q}.scales"]),
    ("gptq", lambda p: edit(p, f"{Q}.scales", torch.ones(3, 64)), [f"{Q}.scales", "3 groups"]),
    ("gptq", lambda p: edit(p, f"{Q}.qzeros", None), [f"{Q}.qzeros"]),
    ("gptq", lambda p: edit(p, f"{Q}.qweight", torch.ones(8, 64)), [f"{Q}.qweight", "F32", "I32"]),
    ("gptq", lambda p: edit(p, f"{Q}.qweight", torch.ones(7, 64).int()), ["[7, 64]", "[8, 64]"]),
    ("gptq", lambda p: edit(p, f"{Q}.g_idx", torch.zeros(64).int()), ["g_idx", "2 equal groups"]),
    ("gptq", lambda p: edit_config(p, bits=3), ["3 bits", "4, 8"]),
    ("gptq", lambda p: edit_config(p, dynamic={"-:.*": {}}), ["dynamic"]),
    ("gptq", lambda p: edit_config(p, checkpoint_format="marlin"), ["marlin", "gptq_v2"]),
    ("gptq", lambda p: edit_config(p, quant_method="aqlm"), ["aqlm", "gptq", "awq", "fp8"]),
    ("awq", lambda p: edit_config(p, version="gemv"), ["gemv", "gemm"]),
    ("awq", lambda p: edit(p, f"{Q}.qzeros", None), [f"{Q}.qzeros"]),
    (
        "int4 by groups",
        lambda p: edit_config(p, format="marlin-24"),
        ["marlin-24", "pack-quantized", "float-quantized"],
    ),
    ("int4 by groups", lambda p: edit(p, f"{Q}.weight_scale", None), [f"{Q}.weight_scale"]),
    (
        "int4 by groups",
        lambda p: edit(p, f"{Q}.weight_packed", torch.ones(64, 5).int()),
        ["2.5 bits"],
    ),
    ("nf4", lambda p: edit(p, f"{Q}.weight.absmax", None), [f"{Q}.weight.absmax"]),
    (
        "nf4",
        lambda p: edit(
            p, f"{Q}.weight.quant_state.bitsandbytes__nf4", torch.ones(3, dtype=torch.uint8)
        ),
        ["quant_state"],
    ),
    ("nf4", lambda p: edit(p, f"{Q}.weight.absmax", torch.ones(3)), ["differ in number"]),
    ("bitsandbytes int8", lambda p: edit(p, f"{Q}.SCB", torch.ones(3)), [f"{Q}.SCB", "[3]"]),
]


@pytest.mark.parametrize(("name", "damage", "named"), DEFECTS)
def test_wrong_checkpoint_is_refused_in_one_sentence(
    name: str, damage: Callable[[Path], object], named: list[str], tmp_path: Path
) -> None:
    quantize(tmp_path, make_checkpoint(tmp_path, FAMILIES["llama"]), FORMATS[name])
    damage(tmp_path)
    with pytest.raises(CheckpointError) as refusal:
        load_model(tmp_path, torch.float32)
    message = str(refusal.value)
    assert message.endswith(".")
    assert "\n" not in message
    for part in named:
        assert part in message
