"""Tensor parallelism: two ranks agree with a single process."""

import json
import multiprocessing
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import (
    HunYuanMoEV1Config,
    LlamaConfig,
    Olmo2Config,
    PreTrainedConfig,
    Qwen3MoeConfig,
)

from services.common.settings import StartupError
from services.engine.batch.step_batch import StepBatch
from services.engine.execution.adapter_files import convert_adapter
from services.engine.execution.decode_graphs import DecodeGraphs
from services.engine.execution.model_runner import ModelRunner
from services.engine.messages import AddRequest
from services.engine.model.adapters.adapters import ConvertedAdapter
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.loader import load_model, load_spec
from services.engine.model.lockstep import Follower
from services.engine.model.model import Model
from services.engine.model.parts.shard import Shard
from services.engine.ranks.all_reduce import SymmetricAllReduce
from services.engine.ranks.gloo_plans import GlooPlans
from services.engine.ranks.group import RankGroup
from services.engine.ranks.rank import Rank
from tests.stack import free_ports
from tests.unit.engine import tiny
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, make_packed_checkpoint
from tests.unit.engine.machines import needs_tiles
from tests.unit.engine.model.adapters.adapter_folders import make_adapter
from tests.unit.engine.quantized_checkpoints import FORMATS, quantize

RANKS = 2
TOKENS = 60
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
SUMMED = ("llama, biases", "olmo2", "qwen3 moe")
"""Families that sum products, squares and experts over the ranks"""
ADAPTED = (
    "llama, biases",
    "phi3, long",
    "olmo2",
    "granite",
    "gpt-neox",
    "stablelm, norms",
    "starcoder2",
    "gpt2",
    "bloom, six heads",
    "mixtral",
    "qwen3 moe",
    "phimoe",
    "gpt-oss",
    "glm moe dsa",
    "bailing hybrid",
    "cohere2 moe",
    "kimi linear",
    "laguna",
    "minicpm3",
    "minimax m3",
    "recurrent gemma",
    "inkling",
    "lfm2",
    "lfm3",
    "granite hybrid, dense",
    "nemotron h",
    "falcon h1",
    "mamba2, biases",
    "falcon mamba",
    "jamba",
    "zamba",
    "zamba2, adapters",
    "minimax",
)
"""Families with adapters: one layer for several products, one key head for two ranks, LayerNorms,
transposed weights, experts"""
ABSENT = "absent"
"""Adapter that rank 0 alone can read"""
STACKS = ["experts.gate_up_proj", "experts.down_proj"]
PROMPTS = ([1, 2, 3], [4, 5], list(range(1, 41)), [7] * 9, [9, 8])


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
        context.Process(target=_run_rank, args=(Rank(n, RANKS, n, RANKS), port, checkpoints, out))
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


def _run_rank(rank: Rank, port: int, checkpoints: dict[str, Path], out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, torch.device("cpu"))
    computed = {name: _compute(path, _dtype(name), ranks) for name, path in checkpoints.items()}
    over_gloo = RankGroup(rank, plans=GlooPlans(dist.new_group(backend="gloo")))
    for name in ADAPTED:
        computed[f"{name}, adapted"] = _compute_adapted(checkpoints[name], ranks)
    computed["over gloo"] = _compute(checkpoints["qwen3"], torch.float32, over_gloo)
    _exchange_plans(over_gloo)
    _generate_in_graphs(out / "model", ranks, out / "tokens")
    kernels = _cpu_kernels()
    ranks.all_reduce = SymmetricAllReduce(torch.empty(1 << 20, dtype=torch.uint8), "", False)
    for name in SUMMED:
        computed[f"{name}, symmetric"] = _compute(checkpoints[name], torch.float32, ranks)
    del kernels
    if rank.leads:
        torch.save(computed, out / "logits")


def _compute(path: Path, dtype: torch.dtype, ranks: RankGroup) -> list[Tensor]:
    """Return rank 0's logits."""
    decoder = load_model(path, dtype, ranks=ranks)
    driver = _driver(decoder)
    if ranks.rank.leads:
        logits = _drive(driver)
        ranks.dissolve()
        return logits
    Follower(decoder, driver.cache, ranks).run()
    return []


def _compute_adapted(path: Path, ranks: RankGroup) -> list[Tensor]:
    """Return rank 0's logits for sequences with an adapter, with another, and with none."""
    decoder = load_model(path, torch.float32, ranks=ranks)
    if not ranks.rank.leads:
        driver = _driver(decoder)
        read = partial(_read_unless_absent, decoder)
        Follower(decoder, driver.cache, ranks, read_adapter=read).run()
        return []
    runner = ModelRunner(decoder, _driver(decoder).cache)
    runner.read_adapter(1, path / ABSENT)
    with pytest.raises(CheckpointError, match="absent on rank 1"):
        runner.insert_adapter(1)
    logits = _drive_adapted(decoder, path)
    ranks.dissolve()
    return logits


def _read_unless_absent(decoder: Model, directory: Path) -> ConvertedAdapter:
    if directory.name == ABSENT:
        raise CheckpointError("absent on rank 1")
    return convert_adapter(decoder, directory)


def _drive_adapted(decoder: Model, path: Path) -> list[Tensor]:
    driver = Driver(decoder, _sequences(), adapters=[2, 0, 1])
    runner = ModelRunner(decoder, driver.cache)
    for number in (1, 2):
        runner.read_adapter(number, path / f"adapter{number}")
        runner.insert_adapter(number)
    return _drive(driver)


def _exchange_plans(ranks: RankGroup) -> None:
    for size in (1, 8_184, 8_185, 100_000, 0):
        plan = bytes(i % 251 for i in range(size))
        if ranks.rank.leads:
            ranks.send(plan)
        else:
            assert ranks.receive() == plan


def _cpu_kernels() -> torch.library.Library:
    """Define the kernels of symmetric memory on the CPU; they last as long as the return value."""

    def sum_up(operand: Tensor, _operation: str, _group: str, out: Tensor) -> Tensor:
        dist.all_reduce(operand)
        return out.copy_(operand)

    library = torch.library.Library("symm_mem", "IMPL")  # type: ignore[no-untyped-call]
    for name in ("one_shot_all_reduce_out", "two_shot_all_reduce_out"):
        library.impl(name, sum_up, "CPU")  # type: ignore[no-untyped-call]
    return library


def _dtype(name: str) -> torch.dtype:
    return torch.bfloat16 if name.endswith("wide") else torch.float32


def _driver(decoder: Model) -> Driver:
    return Driver(decoder, _sequences())


def _sequences() -> list[Tensor]:
    return [random_tokens(TOKENS, seed) for seed in range(3)]


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
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_change_the_logits_of_two_ranks_as_of_one(
    name: str, checkpoints: dict[str, Path], by_two: dict[str, list[Tensor]]
) -> None:
    """Both begin with the same files, of which each rank keeps its part."""
    decoder = load_model(checkpoints[name], torch.float32)
    expected = _drive_adapted(decoder, checkpoints[name])
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


def _requests() -> list[AddRequest]:
    """Return requests that need logits of the last rows, and of rows in between."""
    return [
        tiny.make_request(1, PROMPTS),
        tiny.make_request(2, PROMPTS[2:3], prompt_logprobs=1, max_tokens=20),
    ]


def _generate_in_graphs(path: Path, ranks: RankGroup, out: Path) -> None:
    """Generate with padded decode steps, which all ranks run as what is a graph on a GPU."""
    decoder = load_model(path, torch.float32, ranks=ranks)
    if ranks.rank.leads:
        loop = tiny.make_loop(decoder, padded=True, overlaps=True)
        torch.save(tiny.tokens_of(tiny.run(loop, _requests())), out)
        ranks.dissolve()
        return
    cache = decoder.allocate_cache(256 + 1, tiny.BLOCK)
    graphs = DecodeGraphs(decoder, cache)
    addresses: dict[object, set[object]] = {}

    def run(batch: StepBatch) -> Tensor:
        places = (batch.token_ids.data_ptr(), batch.block_tables.data_ptr())
        addresses.setdefault(batch.block_tables.shape, set()).add(places)
        return graphs.run(batch)

    follower = Follower(decoder, cache, ranks, run)
    follower.reserve(512, 64, tiny.CONTEXT)
    follower.run()
    # one graph for each shape, which reads the addresses of its capture
    assert len(addresses) > 1
    assert all(len(places) == 1 for places in addresses.values())


def test_decode_steps_run_as_the_same_graph_on_all_ranks(outputs: Path) -> None:
    loop = tiny.make_loop(load_model(outputs / "model", torch.float32))
    generated = torch.load(outputs / "tokens", weights_only=False)
    assert generated == tiny.tokens_of(tiny.run(loop, _requests()))


@needs_tiles
@pytest.mark.parametrize("name", ["quantized", "gpt-oss, packed"])
def test_ranks_share_quantized_weights(
    name: str, checkpoints: dict[str, Path], by_two: dict[str, list[Tensor]]
) -> None:
    """Sums over ranks differ in their last bits, which may round a row to another code."""
    expected = _drive(_driver(load_model(checkpoints[name], torch.float32)))
    for ours, theirs in zip(by_two[name], expected, strict=True):
        assert (ours - theirs).abs().mean() < 0.01 * theirs.std()


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
