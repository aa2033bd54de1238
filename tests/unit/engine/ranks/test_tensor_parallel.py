"""Tensor parallelism: two ranks agree with a single process."""

import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Olmo2Config, PreTrainedConfig, Qwen3MoeConfig

from services.common.settings import StartupError
from services.engine.model.architecture.spec import ExpertsSpec, ModelSpec
from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model, load_spec
from services.engine.model.lockstep import follow
from services.engine.model.shard import Shard
from services.engine.ranks.group import RankGroup
from services.engine.ranks.rank import Rank
from tests.stack import free_ports
from tests.unit.engine.checkpoints import (
    CONFIGS,
    Driver,
    make_checkpoint,
    make_packed_checkpoint,
    random_tokens,
)
from tests.unit.engine.machines import needs_tiles

RANKS = 2
TOKENS = 60
FAMILIES = (
    "llama, biases",
    "mistral, window",
    "qwen2, tied",
    "qwen3",
    "gemma2",
    "gemma3",
    "phi3",
    "phi3, long",
    "olmo2",
    "granite",
    "smollm3",
    "starcoder2",
    "gpt2",
    "mixtral",
    "qwen3 moe",
    "gpt-oss",
    "gpt-oss, packed",
)
_WIDE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.2,
}
IN_TILES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**_WIDE, attention_bias=True, mlp_bias=True),
    "olmo2": Olmo2Config(**_WIDE | {"num_key_value_heads": 1}),
    "qwen3 moe": Qwen3MoeConfig(
        **_WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
}
"""Models whose shards are multiples of 32 wide"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {name: CONFIGS[name] for name in FAMILIES if name in CONFIGS}
    configs |= {f"{name}, wide": config for name, config in IN_TILES.items()}
    made = {}
    for name, config in configs.items():
        made[name] = tmp_path_factory.mktemp("checkpoint")
        make_checkpoint(made[name], config)
    made["gpt-oss, packed"] = tmp_path_factory.mktemp("checkpoint")
    make_packed_checkpoint(made["gpt-oss, packed"])
    return made


@pytest.fixture(scope="module")
def by_two(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[Tensor]]:
    """Logits of each checkpoint on two ranks; wide ones in bfloat16, the others in float32."""
    out = tmp_path_factory.mktemp("logits") / "logits"
    [port] = free_ports(1)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run_rank, args=(Rank(n, RANKS, n, RANKS), port, checkpoints, out))
        for n in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    computed: dict[str, list[Tensor]] = torch.load(out)
    return computed


def _run_rank(rank: Rank, port: int, checkpoints: dict[str, Path], out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, torch.device("cpu"))
    computed = {}
    for name, path in checkpoints.items():
        decoder = load_model(path, _dtype(name), ranks=ranks)
        driver = _driver(decoder)
        if rank.leads:
            computed[name] = _drive(driver)
            ranks.dissolve()
        else:
            follow(decoder, driver.cache, ranks)
    if rank.leads:
        torch.save(computed, out)


def _dtype(name: str) -> torch.dtype:
    return torch.bfloat16 if name.endswith("wide") else torch.float32


def _driver(decoder: Decoder) -> Driver:
    return Driver(decoder, [random_tokens(TOKENS, seed) for seed in range(3)])


def _drive(driver: Driver) -> list[Tensor]:
    """Return logits at most positions: prefilled at once, in chunks, and decoded."""
    driver.step([(0, TOKENS)])
    driver.step([(1, 40), (2, 17)], kept=[1, 9])
    driver.step([(1, 1), (2, 30)])
    while len(driver.logits[1]) < TOKENS:
        driver.step([(1, 1), (2, 1)] if len(driver.logits[2]) < TOKENS else [(1, 1)])
    return [logits[~logits.isnan().any(dim=1)] for logits in driver.logits]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_two_ranks_equal_those_of_one(
    name: str, checkpoints: dict[str, Path], by_two: dict[str, list[Tensor]]
) -> None:
    expected = _drive(_driver(load_model(checkpoints[name], torch.float32)))
    for ours, theirs in zip(by_two[name], expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()


@needs_tiles
@pytest.mark.parametrize("name", [f"{name}, wide" for name in IN_TILES])
def test_tiled_shards_round_no_worse_than_the_whole_model(
    name: str, checkpoints: dict[str, Path], by_two: dict[str, list[Tensor]]
) -> None:
    exact, rounded = (
        torch.cat(_drive(_driver(load_model(checkpoints[name], dtype))))
        for dtype in (torch.float32, torch.bfloat16)
    )
    # The median, because rounding may send a token to another expert.
    usual = (rounded - exact).abs().median()
    assert (torch.cat(by_two[name]) - exact).abs().median() < 1.3 * usual


@pytest.fixture(scope="module")
def spec(checkpoints: dict[str, Path]) -> ModelSpec:
    return load_spec(checkpoints["qwen3"])  # 4 query heads, 2 key heads


@pytest.mark.parametrize(
    ("change", "ranks", "complaint"),
    [
        ({}, 3, r"num_attention_heads \(4\)"),
        ({"num_heads": 6}, 3, r"num_key_value_heads \(2\)"),
        ({"intermediate_size": 129}, 2, r"intermediate_size \(129\)"),
        ({"experts": ExpertsSpec(4, 2, 33, True, (), False)}, 2, r"experts' .* \(33\)"),
        ({"vocab_size": 5}, 4, r"vocab_size \(5\)"),
    ],
)
def test_indivisible_model_is_refused_with_the_reason(
    spec: ModelSpec, change: dict[str, object], ranks: int, complaint: str
) -> None:
    with pytest.raises(StartupError, match=f"into {ranks} parts: .*{complaint}"):
        Shard(0, ranks).of(replace(spec, **change))  # type: ignore[arg-type]


def test_more_ranks_than_key_heads_share_heads(spec: ModelSpec) -> None:
    assert Shard(0, 4).of(spec).num_kv_heads == 1
    assert [Shard(number, 4).of_heads(2).number for number in range(4)] == [0, 0, 1, 1]


def test_ranks_on_a_machine_share_its_cores() -> None:
    assert Rank().threads(0) == 0  # torch chooses
    assert Rank(1, 4, 1, 2).threads(3) == 3
    assert Rank(1, 10**6, 1, 10**6).threads(0) == 1


def test_incomplete_torchrun_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(StartupError, match="torchrun"):
        Rank.from_environment()
