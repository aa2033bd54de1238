"""Two ranks that share a model on transformers' modules agree with a single process."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import HeliumConfig, PreTrainedConfig

from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.checkpoint.tensors import Checkpoint
from services.engine.model.transformers_code.linear import Division
from services.engine.model.transformers_code.plan import ModelPlan
from services.engine.ranks.rank import Rank
from tests.stack import free_ports
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.shapes import SHAPE
from tests.unit.engine.machines import needs_tiles
from tests.unit.engine.model.adapters.adapter_folders import make_adapter
from tests.unit.engine.model.transformers_code.rank_logits import ADAPTED, WIDE, compute, run_rank

RANKS = 2
_WIDE = {"num_attention_heads": 4, "hidden_size": 128, "intermediate_size": 128}
FAMILIES: dict[str, PreTrainedConfig] = {
    "helium": HeliumConfig(**SHAPE, head_dim=16),
    "llama, biases": CONFIGS["llama, biases"],
    "qwen3": CONFIGS["qwen3"],
    "gemma2": CONFIGS["gemma2"],
    "gpt-neox": CONFIGS["gpt-neox"],
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in {**FAMILIES, WIDE: HeliumConfig(**SHAPE | _WIDE, head_dim=32)}.items():
        made[name] = tmp_path_factory.mktemp("checkpoint")
        model = make_checkpoint(made[name], config)
        for number in (1, 2) if name in ADAPTED else ():
            make_adapter(model, made[name] / str(number), seed=number)
    return made


@pytest.fixture(scope="module")
def by_two(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Tensor]]:
    """Rank 0's logits of each checkpoint."""
    out = tmp_path_factory.mktemp("outputs") / "logits"
    [port] = free_ports(1)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=run_rank, args=(Rank(n, RANKS, n, RANKS), port, checkpoints, out))
        for n in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    computed: dict[str, list[Tensor]] = torch.load(out)
    return computed


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_two_ranks_equal_those_of_one(
    name: str, checkpoints: dict[str, Path], by_two: dict[str, list[Tensor]]
) -> None:
    """With adapters for some sequences where the family has them here."""
    expected = compute(name, checkpoints[name])
    for ours, theirs in zip(by_two[name], expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max().clamp(min=1)


@needs_tiles
def test_ranks_share_packed_products(
    checkpoints: dict[str, Path], by_two: dict[str, list[Tensor]]
) -> None:
    expected = compute(WIDE, checkpoints[WIDE])
    for ours, theirs in zip(by_two[WIDE], expected, strict=True):
        assert (ours - theirs).abs().mean() < 0.02 * theirs.std()


@pytest.mark.parametrize("name", FAMILIES)
def test_no_rank_has_a_whole_linear_layer(name: str, checkpoints: dict[str, Path]) -> None:
    """Ranks would hold the weights of feed-forward layers several times."""
    plan = ModelPlan.of(Checkpoint.config(checkpoints[name]), torch.float32, RANKS)
    whole = [each for each, linear in plan.linears.items() if linear.division is Division.NONE]
    assert not whole


@pytest.mark.parametrize("layer", ["self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"])
def test_plan_that_lacks_a_layer_is_refused(
    layer: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dict(HeliumConfig.base_model_tp_plan)
    del plan[f"layers.*.{layer}"]
    monkeypatch.setattr(HeliumConfig, "base_model_tp_plan", plan)
    with pytest.raises(CheckpointError, match="its tp_plan fails for 2 ranks"):
        ModelPlan.of(Checkpoint.config(checkpoints["helium"]), torch.float32, RANKS)


REFUSED = {
    "phi3": (2, "has no tp_plan that divides its layers among 2 ranks"),
    "gpt2": (2, "has no tp_plan that divides its layers among 2 ranks"),
    "mixtral": (2, "its experts can't be divided among 2 ranks"),
    "qwen3": (3, "wide, which 3 ranks can't divide"),
    "llama": (4, "its tp_plan fails for 4 ranks"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_ranks_cannot_share_are_refused_before_their_weights_are_read(
    name: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, CONFIGS[name])
    (tmp_path / "model.safetensors").unlink()
    ranks, reason = REFUSED[name]
    with pytest.raises(CheckpointError, match=reason):
        ModelPlan.of(Checkpoint.config(tmp_path), torch.float32, ranks)
