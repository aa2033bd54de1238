"""Adapters change the logits as the same adapters merged by PEFT do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, YoutuConfig

import services.engine.model.attention
import services.engine.model.loader
from services.engine.model.adapters.peft_files import PeftAdapter
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.loader import load_model
from services.engine.model.model import Model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.checkpoints.shapes import LATENT
from tests.unit.engine.machines import needs_tiles
from tests.unit.engine.model.adapters.adapter_folders import (
    AdaptedModel,
    make_adapter,
    make_separate_adapter,
)

TOKENS = 40
STACKS = ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]
_OF_GRANITE = [f"block_sparse_moe.{name.removeprefix('mlp.')}" for name in STACKS]
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": {"target_parameters": [*STACKS, "mlp.gate.weight"]},
    "qwen3 moe": {
        "target_parameters": STACKS,
        "rank_pattern": {r".*\.gate_up_proj": 8},
        "alpha_pattern": {r"layers\.0\.mlp\.experts\.down_proj": 11.0},
    },
    "qwen3 moe, normalized": {"target_parameters": STACKS[:1], "use_rslora": True},
    "gpt-oss": {"target_parameters": [*STACKS, "router.weight"]},
    "granite moe": {"target_parameters": [*_OF_GRANITE, "block_sparse_moe.router.weight"]},
    "phimoe": {"target_parameters": STACKS},
    "qwen2 moe": {"target_parameters": [*STACKS, "mlp.gate.weight"]},
    "inkling": {"target_parameters": [*STACKS, "mlp.gate.weight"]},
    "longcat flash": {"target_parameters": STACKS},
    "qwen3 vl moe": {"target_parameters": STACKS},
}
"""Adapters of parameters that stack all experts"""
_ROUGH = ("gemma4, shared keys", "mamba")
"""Models whose rounding random adapters amplify: ours and transformers' are each within 1.1e-4 of
float64, and up to 2e-4 apart"""

_WITHOUT = ("afmoe", "deepseek v4", "minimax m3, with images", "inkling, with images")
"""Models without adapters: PEFT makes none where an output gate has the name of an expert's
product, DeepSeek V4's are refused at the start, and published files of MiniMax M3 and of Inkling
have other names than the modules that PEFT adapts"""


def load(decoder: Model, number: int, folder: Path) -> None:
    assert decoder.adapters is not None
    decoder.adapters.load(number, PeftAdapter.read(folder))


def assert_equal(ours: Tensor, theirs: Tensor, tolerance: float = 1e-4) -> None:
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)


@pytest.fixture(params=["torch", "native"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(services.engine.model.loader, "native", None)
        monkeypatch.setattr(services.engine.model.attention, "native", None)


SEQUENCES = [random_tokens(TOKENS, seed) for seed in range(4)]
ADAPTER_NUMBERS = (1, 0, 2, 1)
"""The adapter of each sequence; 0: none"""


def merged_logits(models: list[PreTrainedModel]) -> list[Tensor]:
    """Return the logits of each sequence with its adapter.

    models: without an adapter, with adapter 1 and with adapter 2.
    """
    pairs = zip(SEQUENCES, ADAPTER_NUMBERS, strict=True)
    return [reference_logits(models[number], tokens) for tokens, number in pairs]


def assert_rows_equal_merged_models(
    decoder: Model, expected: list[Tensor], tolerance: float = 1e-4
) -> None:
    """In one step: whole prompts, chunks and decodes; the last layer sees some rows alone."""
    driver = Driver(decoder, SEQUENCES, adapters=ADAPTER_NUMBERS)
    driver.step([(0, TOKENS - 2), (1, 20)])
    driver.step([(0, 1), (1, 5), (2, TOKENS - 1), (3, 30)])
    driver.step([(0, 1), (2, 1), (1, 5), (3, TOKENS - 30)], kept=[1, 1, 5, 2])
    for ours, theirs in zip(driver.logits, expected, strict=True):
        known = ~ours.isnan().any(dim=1)
        assert known.sum() > 20
        assert_equal(ours[known], theirs[: len(ours)][known], tolerance)


@pytest.fixture(scope="module", params=[name for name in CONFIGS if name not in _WITHOUT])
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[Tensor]]:
    """Return the family's name, a folder and the logits of each sequence with its adapter.

    The folder holds the checkpoint, "model", and both adapters, "1" and "2".
    """
    folder = tmp_path_factory.mktemp("family")
    model = make_checkpoint(folder / "model", CONFIGS[request.param])
    logits = {(0, 1): reference_logits(model, SEQUENCES[1])}
    adapted = AdaptedModel(model)
    for number in (1, 2):
        adapted.make(folder / str(number), seed=number)
        with adapted.merged() as merged:
            for place, tokens in enumerate(SEQUENCES):
                if ADAPTER_NUMBERS[place] == number:
                    logits[number, place] = reference_logits(merged, tokens)
    return request.param, folder, [logits[n, place] for place, n in enumerate(ADAPTER_NUMBERS)]


@pytest.mark.usefixtures("backend")
def test_rows_of_several_adapters_and_none_equal_the_merged_models(
    family: tuple[str, Path, list[Tensor]],
) -> None:
    name, folder, expected = family
    decoder = load_model(folder / "model", torch.float32)
    for number in (1, 2):
        load(decoder, number, folder / str(number))
    assert_rows_equal_merged_models(decoder, expected, 3e-4 if name in _ROUGH else 1e-4)


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["llama", "deepseek v3", "qwen3 next"])
def test_adapters_act_while_hidden_states_are_copied_for_a_draft_head(
    name: str, tmp_path: Path
) -> None:
    """The copies behind the last layer need all rows of it, with their adapters."""
    model = make_checkpoint(tmp_path / "model", CONFIGS[name])
    models = [model, *(make_adapter(model, tmp_path / str(n), seed=n) for n in (1, 2))]
    decoder = load_model(tmp_path / "model", torch.float32)
    decoder.tap([1, decoder.spec.num_layers])
    for number in (1, 2):
        load(decoder, number, tmp_path / str(number))
    assert_rows_equal_merged_models(decoder, merged_logits(models))


def test_decode_of_latents_does_not_depend_on_a_neighbour_with_an_adapter(tmp_path: Path) -> None:
    """An adapter changes the keys and values of its own sequence alone."""
    model = make_checkpoint(tmp_path / "model", CONFIGS["youtu"])
    decoder = load_model(tmp_path / "model", torch.float32)
    make_adapter(model, tmp_path / "1", seed=1)
    load(decoder, 1, tmp_path / "1")
    sequences = [random_tokens(TOKENS, seed) for seed in range(3)]
    found = []
    for neighbour in (0, 1):
        driver = Driver(decoder, sequences, adapters=[0, neighbour, 0])
        for index in range(3):
            driver.step([(index, TOKENS - 1)])
        driver.step([(0, 1), (1, 1), (2, 1)])
        found.append(driver.logits)
    for index in (0, 2):
        assert torch.equal(found[0][index], found[1][index])
    assert not torch.equal(found[0][1], found[1][1])


@needs_tiles
def test_latents_that_do_not_fit_tiles_take_adapters(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", YoutuConfig(**LATENT | {"kv_lora_rank": 40}))
    decoder = load_model(tmp_path / "model", torch.bfloat16)
    merged = make_adapter(model, tmp_path / "1", seed=1)
    load(decoder, 1, tmp_path / "1")
    tokens = random_tokens(TOKENS, 1)
    driver = Driver(decoder, [tokens], adapters=[1])
    driver.step([(0, TOKENS)])
    exact = reference_logits(merged, tokens)
    assert (driver.logits[0] - exact).abs().mean() < 0.05 * exact.std()


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", EXPERTS)
def test_adapters_of_stacked_experts_equal_the_merged_models(name: str, tmp_path: Path) -> None:
    """As PEFT writes them for transformers 5, beside one of attention alone."""
    model = make_checkpoint(tmp_path / "model", CONFIGS[name])
    decoder = load_model(tmp_path / "model", torch.float32)
    of_experts = make_adapter(model, tmp_path / "1", seed=1, **EXPERTS[name])
    models = [model, of_experts, make_adapter(model, tmp_path / "2", seed=2)]
    for number in (1, 2):
        load(decoder, number, tmp_path / str(number))
    assert_rows_equal_merged_models(decoder, merged_logits(models))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", ["mixtral", "qwen3 moe"])
def test_adapters_of_separate_experts_equal_the_merged_models(name: str, tmp_path: Path) -> None:
    """As PEFT writes them for transformers 4, beside one of stacked experts."""
    model = make_checkpoint(tmp_path / "model", CONFIGS[name])
    decoder = load_model(tmp_path / "model", torch.float32)
    stacked = make_adapter(model, tmp_path / "1", seed=1, **EXPERTS[name])
    separate = make_separate_adapter(model, tmp_path / "model", tmp_path / "2", seed=2)
    for number in (1, 2):
        load(decoder, number, tmp_path / str(number))
    assert_rows_equal_merged_models(decoder, merged_logits([model, stacked, separate]))


def test_adapter_of_a_shared_block_is_refused(tmp_path: Path) -> None:
    """PEFT trains it for one depth, but all depths have the same product."""
    model = make_checkpoint(tmp_path / "model", CONFIGS["zamba2"])
    target = "model.layers.1.shared_transformer.self_attn.q_proj"
    make_adapter(model, tmp_path / "adapter", 1, target_modules=[target])
    with pytest.raises(CheckpointError, match="several depths share"):
        load(load_model(tmp_path / "model", torch.float32), 1, tmp_path / "adapter")


def test_adapter_of_biases_of_experts_is_refused(tmp_path: Path) -> None:
    """PEFT numbers an expert layer's parameters: with one more, names mean other parameters."""
    model = make_checkpoint(tmp_path / "model", CONFIGS["gpt-oss"])
    targets = [*STACKS, "mlp.experts.gate_up_proj_bias"]
    make_adapter(model, tmp_path / "adapter", 1, target_parameters=targets)
    with pytest.raises(CheckpointError, match="gate_up_proj and down_proj alone"):
        PeftAdapter.read(tmp_path / "adapter")


@pytest.mark.parametrize(
    "settings",
    [
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {r"layers\.1\.mlp\..*": 11.0}},
        {"target_modules": ["v_proj", "down_proj"]},
    ],
    ids=["rsLoRA", "patterns", "some layers"],
)
def test_scales_and_ranks_are_those_of_peft(settings: dict[str, object], tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", CONFIGS["llama"])
    merged = make_adapter(model, tmp_path / "adapter", 1, 4, **settings)
    decoder = load_model(tmp_path / "model", torch.float32)
    load(decoder, 1, tmp_path / "adapter")
    tokens = random_tokens(TOKENS, 0)
    driver = Driver(decoder, [tokens], adapters=[1])
    driver.step([(0, TOKENS)])
    assert_equal(driver.logits[0], reference_logits(merged, tokens))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_loaded_adapter_stays_as_it_was_when_its_file_changes(
    name: str, rank: int, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model", CONFIGS[name])
    merged = make_adapter(model, tmp_path / "adapter", 1, rank, **EXPERTS.get(name, {}))
    decoder = load_model(tmp_path / "model", torch.float32)
    load(decoder, 1, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    tokens = random_tokens(TOKENS, 0)
    driver = Driver(decoder, [tokens], adapters=[1])
    driver.step([(0, TOKENS)])
    assert_equal(driver.logits[0], reference_logits(merged, tokens))


def test_adapter_of_unknown_layers_changes_nothing(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", CONFIGS["llama"])
    make_adapter(model, tmp_path / "adapter", 1, target_modules=["q_proj"])
    other = make_checkpoint(tmp_path / "other", CONFIGS["gpt2"])
    decoder = load_model(tmp_path / "other", torch.float32)
    with pytest.raises(CheckpointError, match="can't have an adapter"):
        load(decoder, 1, tmp_path / "adapter")
    tokens = random_tokens(TOKENS, 0)
    driver = Driver(decoder, [tokens])
    driver.step([(0, TOKENS)])
    assert_equal(driver.logits[0], reference_logits(other, tokens))
