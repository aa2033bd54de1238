"""Adapters change a model on transformers' modules as the same adapters merged by PEFT do."""

from pathlib import Path

import pytest
import torch
from transformers import BertConfig, HeliumConfig, PreTrainedConfig, PreTrainedModel

from services.engine.execution.model_loader import load_any_model
from services.engine.model.adapters.peft_files import PeftAdapter
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.model import Model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.checkpoints.shapes import SHAPE
from tests.unit.engine.machines import needs_tiles
from tests.unit.engine.model.adapters.adapter_folders import make_adapter

TOKENS = 40
FAMILIES: dict[str, PreTrainedConfig] = {
    "helium, no family of ours": HeliumConfig(**SHAPE, head_dim=16),
    "llama, with biases": CONFIGS["llama, biases"],
    "qwen3, with norms of heads": CONFIGS["qwen3"],
    "phi3, one layer for several products": CONFIGS["phi3"],
    "gpt2, with transposed weights": CONFIGS["gpt2"],
    "gemma2, with caps and windows": CONFIGS["gemma2"],
    "mixtral, beside its experts": CONFIGS["mixtral"],
}


def load(path: Path, dtype: torch.dtype = torch.float32) -> Model:
    """Load a checkpoint on transformers' code, with its adapters."""
    model = load_any_model(path, dtype, code="transformers")
    assert model.adapters is not None
    for number in (1, 2):
        model.adapters.load(number, PeftAdapter.read(path / str(number)))
    return model


def make(path: Path, config: PreTrainedConfig) -> list[PreTrainedModel]:
    """Save a model and two adapters of it. Return it without an adapter, with 1 and with 2."""
    model = make_checkpoint(path, config)
    adapted = [make_adapter(model, path / str(number), seed=number) for number in (1, 2)]
    return [model, *adapted]


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_of_several_adapters_and_none_equal_the_merged_models(
    name: str, tmp_path: Path
) -> None:
    """In one step: whole prompts, chunks and decodes, with adapters 1 and 2 and without one."""
    models = make(tmp_path, FAMILIES[name])
    sequences, adapters = [random_tokens(TOKENS, seed) for seed in range(4)], [1, 0, 2, 1]
    driver = Driver(load(tmp_path), sequences, adapters=adapters)
    driver.step([(0, TOKENS - 2), (1, 20)])
    driver.step([(0, 1), (1, 5), (2, TOKENS - 1), (3, 30)])
    driver.step([(0, 1), (2, 1), (1, 5), (3, TOKENS - 30)], kept=[1, 1, 5, 2])
    for tokens, adapter, ours in zip(sequences, adapters, driver.logits, strict=True):
        theirs = reference_logits(models[adapter], tokens)[: len(ours)]
        known = ~ours.isnan().any(dim=1)
        assert known.sum() > 20
        torch.testing.assert_close(ours[known], theirs[known], atol=1e-4, rtol=0)


@needs_tiles
def test_adapters_of_packed_products_equal_the_merged_models(tmp_path: Path) -> None:
    shape = SHAPE | {"num_attention_heads": 2, "intermediate_size": 128}
    models = make(tmp_path, HeliumConfig(**shape, head_dim=32))
    sequences, adapters = [random_tokens(TOKENS, seed) for seed in range(3)], [1, 0, 2]
    driver = Driver(load(tmp_path, torch.bfloat16), sequences, adapters=adapters)
    driver.step([(0, TOKENS - 1), (1, TOKENS), (2, TOKENS - 1)])
    driver.step([(0, 1), (2, 1)])
    for tokens, adapter, ours in zip(sequences, adapters, driver.logits, strict=True):
        theirs = reference_logits(models[adapter], tokens)
        assert (ours - theirs).abs().mean() < 0.05 * theirs.std()


def test_an_unloaded_adapter_changes_nothing(tmp_path: Path) -> None:
    models = make(tmp_path, FAMILIES["helium, no family of ours"])
    model = load(tmp_path)
    assert model.adapters is not None
    model.adapters.unload(1)
    tokens = random_tokens(TOKENS, 1)
    driver = Driver(model, [tokens], adapters=[1])
    driver.step([(0, TOKENS)])
    theirs = reference_logits(models[0], tokens)
    torch.testing.assert_close(driver.logits[0], theirs, atol=1e-4, rtol=0)


def test_adapter_of_experts_is_refused(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", CONFIGS["mixtral"])
    stacks = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
    make_adapter(model, tmp_path / "1", seed=1, target_parameters=stacks)
    ours = load_any_model(tmp_path / "model", torch.float32, code="transformers")
    assert ours.adapters is not None
    with pytest.raises(CheckpointError, match=r"experts\.down_proj can't have an adapter"):
        ours.adapters.load(1, PeftAdapter.read(tmp_path / "1"))


def test_adapter_of_a_layer_behind_the_last_norm_is_refused(tmp_path: Path) -> None:
    """The head computes logits of rows whose adapters it does not know."""
    model = make_checkpoint(tmp_path / "model", BertConfig(**SHAPE, is_decoder=True))
    make_adapter(model, tmp_path / "1", seed=1, target_modules=r"cls\..*dense|.*query")
    ours = load_any_model(tmp_path / "model", torch.float32, code="transformers")
    assert ours.adapters is not None
    with pytest.raises(CheckpointError, match=r"transform\.dense can't have an adapter"):
        ours.adapters.load(1, PeftAdapter.read(tmp_path / "1"))
