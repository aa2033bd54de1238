"""Tensor parallelism with weights that stay in the file: each rank reads its part of the pages."""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import GraniteMoeConfig, LlamaConfig

from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.kernels.library import InstructionSet, native
from services.engine.model.loader import load_model
from services.engine.model.lockstep import Follower
from services.engine.ranks.group import SINGLE_RANK, RankGroup
from services.engine.ranks.rank import Rank
from tests.stack import free_ports
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.shapes import SHAPE
from tests.unit.engine.gguf_checkpoints import write_gguf

RANKS = 2
TOKENS = 20
WIDE = SHAPE | {"hidden_size": 256, "intermediate_size": 512}
MODELS = {
    "dense": (LlamaConfig(**WIDE | {"head_dim": 128}), GGMLQuantizationType.Q4_K),
    "experts": (
        GraniteMoeConfig(**WIDE, num_local_experts=4, num_experts_per_tok=2),
        GGMLQuantizationType.Q8_0,
    ),
}

if native is None or native.instruction_set() < InstructionSet.AVX2:
    pytest.skip("the kernels were not built", allow_module_level=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory with the models, and with what two ranks compute."""
    folder = tmp_path_factory.mktemp("models")
    for name, (config, kind) in MODELS.items():
        write_gguf(folder / f"{name}.gguf", make_checkpoint(folder / name, config), kind)
    [port] = free_ports(1)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run_rank, args=(Rank(n, RANKS, n, RANKS), port, folder))
        for n in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return folder


def _run_rank(rank: Rank, port: int, folder: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, torch.device("cpu"))
    computed = {
        (name, weights): _compute(folder / f"{name}.gguf", weights, ranks)
        for name in MODELS
        for weights in ("full", "mapped")
    }
    if rank.leads:
        torch.save(computed, folder / "logits")


def _compute(path: Path, weights: str, ranks: RankGroup = SINGLE_RANK) -> Tensor:
    """Return rank 0's logits of a prompt in two chunks."""
    with opened_checkpoint(path) as directory:
        decoder = load_model(directory, torch.float32, weights=weights, ranks=ranks)
    driver = Driver(decoder, [random_tokens(TOKENS, 1)])
    if not ranks.rank.leads:
        Follower(decoder, driver.cache, ranks).run()
        return torch.empty(0)
    driver.step([(0, TOKENS - 1)])
    driver.step([(0, 1)])
    if not ranks.rank.is_alone:
        ranks.dissolve()
    return driver.logits[0]


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_ranks_equal_those_of_weights_in_memory(name: str, folder: Path) -> None:
    computed = torch.load(folder / "logits")
    assert torch.equal(computed[name, "mapped"], computed[name, "full"])


@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_the_model_together(name: str, folder: Path) -> None:
    """Sums over ranks differ in their last bits, which may round a row to another code."""
    computed, alone = torch.load(folder / "logits"), _compute(folder / f"{name}.gguf", "mapped")
    assert (computed[name, "mapped"] - alone).abs().mean() < 0.01 * alone.std()
