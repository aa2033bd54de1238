"""Tensor parallelism: two ranks agree with a single process."""

import json
import multiprocessing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    HunYuanMoEV1Config,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from services.common.settings import StartupError
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.loader import load_model, load_spec
from services.engine.model.parts.shard import Shard
from services.engine.ranks.rank import Rank
from tests.stack import free_ports
from tests.unit.engine import tiny
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint, make_packed_checkpoint
from tests.unit.engine.machines import needs_tiles
from tests.unit.engine.model.adapters.adapter_folders import make_adapter
from tests.unit.engine.quantized_checkpoints import FORMATS, quantize
from tests.unit.engine.ranks.rank_logits import (
    ABSENT,
    ADAPTED,
    SUMMED,
    drive,
    drive_adapted,
    make_driver,
    requests,
    run_rank,
)

RANKS = 2
FAMILIES = (
    "llama, biases",
    "mistral, window",
    "qwen2, tied",
    "qwen3",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4, shared keys",
    "gemma4, experts",
    "qwen3.5",
    "qwen3 next",
    "phi3",
    "phi3, long",
    "olmo2",
    "olmo3",
    "olmo hybrid",
    "granite",
    "cohere, norms",
    "cohere2 moe",
    "exaone4",
    "glm",
    "gpt-neox",
    "phi",
    "stablelm, norms",
    "nemotron",
    "apertus",
    "hunyuan",
    "ministral3",
    "smollm3",
    "starcoder2",
    "gpt2",
    "bloom, six heads",
    "mpt, clipped",
    "dbrx",
    "mixtral",
    "qwen2 moe",
    "qwen3 moe",
    "phimoe",
    "granite moe",
    "ernie moe",
    "hunyuan moe",
    "gpt-oss",
    "deepseek v2",
    "deepseek v3",
    "deepseek v3.2",
    "deepseek v4",
    "glm moe dsa",
    "glm4 moe",
    "bailing hybrid",
    "kimi linear",
    "laguna",
    "laguna, gates of outputs",
    "minicpm3",
    "lara mini",
    "lfm2",
    "lfm3",
    "lfm2, biases",
    "lfm2 moe",
    "granite hybrid",
    "granite hybrid, dense",
    "bamba",
    "nemotron h",
    "falcon h1",
    "falcon h1, norms",
    "mamba2, biases",
    "falcon mamba",
    "jamba",
    "zamba",
    "zamba2, adapters",
    "minimax",
    "longcat flash",
    "mimo v2 flash",
    "minimax m3",
    "recurrent gemma",
    "inkling",
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
    "hunyuan moe": HunYuanMoEV1Config(**_WIDE, num_experts=4, moe_topk=2),
}
"""Models whose shards are multiples of 32 wide"""
STACKS = ["experts.gate_up_proj", "experts.down_proj"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    configs = {name: CONFIGS[name] for name in FAMILIES if name in CONFIGS}
    configs |= {f"{name}, wide": config for name, config in IN_TILES.items()}
    made = {}
    for name, config in configs.items():
        made[name] = tmp_path_factory.mktemp("checkpoint")
        model = make_checkpoint(made[name], config)
        if name in ADAPTED:
            stacks = STACKS if hasattr(model.config, "num_experts_per_tok") else []
            for number in (1, 2):
                folder = made[name] / f"adapter{number}"
                make_adapter(model, folder, number, target_parameters=stacks)
            (made[name] / ABSENT).symlink_to(folder)
    made["gpt-oss, packed"] = tmp_path_factory.mktemp("checkpoint")
    make_packed_checkpoint(made["gpt-oss, packed"])
    made["quantized"] = tmp_path_factory.mktemp("checkpoint")
    model = make_checkpoint(made["quantized"], IN_TILES["llama"])
    quantize(made["quantized"], model, FORMATS["awq"])
    return made


@pytest.fixture(scope="module")
def outputs(checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with what two ranks compute."""
    out = tmp_path_factory.mktemp("outputs")
    tiny.make_checkpoint(out / "model")
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
    return out


@pytest.fixture(scope="module")
def by_two(outputs: Path) -> dict[str, list[Tensor]]:
    """Logits of each checkpoint on two ranks; wide ones in bfloat16, the others in float32."""
    computed: dict[str, list[Tensor]] = torch.load(outputs / "logits")
    return computed


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_two_ranks_equal_those_of_one(
    name: str, checkpoints: dict[str, Path], by_two: dict[str, list[Tensor]]
) -> None:
    expected = drive(make_driver(load_model(checkpoints[name], torch.float32)))
    for ours, theirs in zip(by_two[name], expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_change_the_logits_of_two_ranks_as_of_one(
    name: str, checkpoints: dict[str, Path], by_two: dict[str, list[Tensor]]
) -> None:
    """Both begin with the same files, of which each rank keeps its part."""
    decoder = load_model(checkpoints[name], torch.float32)
    expected = drive_adapted(decoder, checkpoints[name])
    for ours, theirs in zip(by_two[f"{name}, adapted"], expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_ranks_on_several_machines_exchange_batches_over_gloo(
    by_two: dict[str, list[Tensor]],
) -> None:
    for over_gloo, in_memory in zip(by_two["over gloo"], by_two["qwen3"], strict=True):
        assert torch.equal(over_gloo, in_memory)


@pytest.mark.parametrize("name", SUMMED)
def test_sums_in_symmetric_memory_give_the_same_logits(
    name: str, by_two: dict[str, list[Tensor]]
) -> None:
    for ours, theirs in zip(by_two[f"{name}, symmetric"], by_two[name], strict=True):
        assert torch.equal(ours, theirs)


def test_decode_steps_run_as_the_same_graph_on_all_ranks(outputs: Path) -> None:
    loop = tiny.make_loop(load_model(outputs / "model", torch.float32))
    generated = torch.load(outputs / "tokens", weights_only=False)
    assert generated == tiny.tokens_of(tiny.run(loop, requests()))


@needs_tiles
@pytest.mark.parametrize("name", ["quantized", "gpt-oss, packed"])
def test_ranks_share_quantized_weights(
    name: str, checkpoints: dict[str, Path], by_two: dict[str, list[Tensor]]
) -> None:
    """Sums over ranks differ in their last bits, which may round a row to another code."""
    expected = drive(make_driver(load_model(checkpoints[name], torch.float32)))
    for ours, theirs in zip(by_two[name], expected, strict=True):
        assert (ours - theirs).abs().mean() < 0.01 * theirs.std()


@pytest.mark.parametrize("name", [f"{name}, wide" for name in IN_TILES])
def test_tiled_shards_round_no_worse_than_the_whole_model(
    name: str, checkpoints: dict[str, Path], by_two: dict[str, list[Tensor]]
) -> None:
    exact, rounded = (
        torch.cat(drive(make_driver(load_model(checkpoints[name], dtype))))
        for dtype in (torch.float32, torch.bfloat16)
    )
    # The median, because rounding may send a token to another expert.
    usual = (rounded - exact).abs().median()
    assert (torch.cat(by_two[name]) - exact).abs().median() < 1.3 * usual


@pytest.fixture(scope="module")
def spec(checkpoints: dict[str, Path]) -> ModelSpec:
    return load_spec(checkpoints["qwen3"])  # 4 query heads, 2 key heads


@pytest.mark.parametrize(
    ("name", "change", "ranks", "complaint"),
    [
        ("qwen3", {}, 3, r"num_attention_heads \(4\)"),
        ("qwen3", {"num_attention_heads": 6}, 3, r"num_key_value_heads \(2\)"),
        ("qwen3", {"intermediate_size": 129}, 2, r"intermediate_size \(129\)"),
        ("qwen3 moe", {"moe_intermediate_size": 33}, 2, r"experts' .* \(33\)"),
        ("qwen3", {"vocab_size": 5}, 4, r"vocab_size \(5\)"),
        ("gemma3n", {"activation_sparsity_pattern": [0.5] * 5}, 2, "activation_sparsity_pattern"),
    ],
)
def test_indivisible_model_is_refused_with_the_reason(
    checkpoints: dict[str, Path],
    name: str,
    change: Mapping[str, Any],
    ranks: int,
    complaint: str,
) -> None:
    config = json.loads((checkpoints[name] / "config.json").read_text())
    spec = ModelSpec.from_config({**config, **change})
    with pytest.raises(StartupError, match=f"into {ranks} parts: .*{complaint}"):
        Shard(0, ranks).of(spec)


def test_more_ranks_than_key_heads_share_heads(spec: ModelSpec) -> None:
    assert Shard(0, 4).of(spec).attention(0).num_kv_heads == 1
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
