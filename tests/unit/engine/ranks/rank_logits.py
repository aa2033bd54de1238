"""Logits of small models on the ranks of a group, in chunks and decodes, with and without adapters.

Ranks are processes that import this module, so it imports no transformers.
"""

import os
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.execution.adapter_files import convert_adapter
from services.engine.execution.model_runner import ModelRunner
from services.engine.execution.step_graphs import StepGraphs
from services.engine.messages import AddRequest
from services.engine.model.adapters.adapters import ConvertedAdapter
from services.engine.model.checkpoint.config import CheckpointError
from services.engine.model.loader import load_model
from services.engine.model.lockstep import Follower
from services.engine.model.model import Model
from services.engine.ranks.all_reduce import SymmetricAllReduce
from services.engine.ranks.gloo_plans import GlooPlans
from services.engine.ranks.group import RankGroup
from services.engine.ranks.rank import Rank
from tests.unit.engine import tiny
from tests.unit.engine.checkpoints.driver import Driver, random_tokens

TOKENS = 60
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
PROMPTS = ([1, 2, 3], [4, 5], list(range(1, 41)), [7] * 9, [9, 8])


def run_rank(rank: Rank, port: int, checkpoints: dict[str, Path], out: Path) -> None:
    """Compute the logits of each checkpoint; rank 0 saves them in the folder `out`."""
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
    driver = make_driver(decoder)
    if ranks.rank.leads:
        logits = drive(driver)
        ranks.dissolve()
        return logits
    Follower(decoder, driver.cache, ranks).run()
    return []


def _compute_adapted(path: Path, ranks: RankGroup) -> list[Tensor]:
    """Return rank 0's logits for sequences with an adapter, with another, and with none."""
    decoder = load_model(path, torch.float32, ranks=ranks)
    if not ranks.rank.leads:
        driver = make_driver(decoder)
        read = partial(_read_unless_absent, decoder)
        Follower(decoder, driver.cache, ranks, read_adapter=read).run()
        return []
    runner = ModelRunner(decoder, make_driver(decoder).cache)
    runner.read_adapter(1, path / ABSENT)
    with pytest.raises(CheckpointError, match="absent on rank 1"):
        runner.insert_adapter(1)
    logits = drive_adapted(decoder, path)
    ranks.dissolve()
    return logits


def _read_unless_absent(decoder: Model, directory: Path) -> ConvertedAdapter:
    if directory.name == ABSENT:
        raise CheckpointError("absent on rank 1")
    return convert_adapter(decoder, directory)


def drive_adapted(decoder: Model, path: Path) -> list[Tensor]:
    """Return logits of sequences with adapter 2, with none, and with adapter 1."""
    driver = Driver(decoder, _sequences(), adapters=[2, 0, 1])
    runner = ModelRunner(decoder, driver.cache)
    for number in (1, 2):
        runner.read_adapter(number, path / f"adapter{number}")
        runner.insert_adapter(number)
    return drive(driver)


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


def make_driver(decoder: Model) -> Driver:
    """Return a driver of three sequences."""
    return Driver(decoder, _sequences())


def _sequences() -> list[Tensor]:
    return [random_tokens(TOKENS, seed) for seed in range(3)]


def drive(driver: Driver) -> list[Tensor]:
    """Return logits at most positions: prefilled at once, in chunks, and decoded."""
    driver.step([(0, TOKENS)])
    driver.step([(1, 56), (2, 17)], kept=[1, 9])
    driver.step([(1, 1), (2, 30)])
    while len(driver.logits[1]) < TOKENS:
        driver.step([(1, 1), (2, 1)] if len(driver.logits[2]) < TOKENS else [(1, 1)])
    return [logits[~logits.isnan().any(dim=1)] for logits in driver.logits]


def requests() -> list[AddRequest]:
    """Return requests that need logits of the last rows, and of rows in between."""
    return [
        tiny.make_request(1, PROMPTS),
        tiny.make_request(2, PROMPTS[2:3], prompt_logprobs=1, max_tokens=20),
    ]


def _generate_in_graphs(path: Path, ranks: RankGroup, out: Path) -> None:
    """Generate with padded steps, which all ranks run as what is a graph on a GPU."""
    decoder = load_model(path, torch.float32, ranks=ranks)
    if ranks.rank.leads:
        loop = tiny.make_loop(decoder, padded=True, overlaps=True)
        torch.save(tiny.tokens_of(tiny.run(loop, requests())), out)
        ranks.dissolve()
        return
    cache = decoder.allocate_cache(256 + 1, tiny.BLOCK)
    graphs = StepGraphs(decoder, cache)
    addresses: dict[tuple[object, ...], set[object]] = {}

    def run(batch: StepBatch) -> Tensor:
        places = (batch.token_ids.data_ptr(), batch.block_tables.data_ptr())
        shape = (batch.padded is not None, len(batch.token_ids), *batch.block_tables.shape)
        addresses.setdefault(shape, set()).add(places)
        return graphs.run(batch)

    follower = Follower(decoder, cache, ranks, run)
    follower.reserve(512, 64, tiny.CONTEXT)
    follower.run()
    # one graph for each shape, which reads the addresses of its capture
    assert {is_mixed for is_mixed, *_ in addresses} == {False, True}
    assert all(len(places) == 1 for places in addresses.values())
