"""Tensor parallelism with weights that stay in the file: each rank reads its part of the pages."""

import multiprocessing
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from transformers import GraniteMoeConfig, LlamaConfig

from services.engine.kernels.library import InstructionSet, native
from services.engine.ranks.rank import Rank
from tests.stack import free_ports
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.shapes import SHAPE
from tests.unit.engine.gguf_checkpoints import write_gguf
from tests.unit.engine.ranks.mapped_logits import compute, run_rank

RANKS = 2
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
        context.Process(
            target=run_rank, args=(Rank(n, RANKS, n, RANKS), port, folder, list(MODELS))
        )
        for n in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    return folder


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_ranks_equal_those_of_weights_in_memory(name: str, folder: Path) -> None:
    computed = torch.load(folder / "logits")
    assert torch.equal(computed[name, "mapped"], computed[name, "full"])


@pytest.mark.parametrize("name", MODELS)
def test_ranks_compute_the_model_together(name: str, folder: Path) -> None:
    """Sums over ranks differ in their last bits, which may round a row to another code."""
    computed, alone = torch.load(folder / "logits"), compute(folder / f"{name}.gguf", "mapped")
    assert (computed[name, "mapped"] - alone).abs().mean() < 0.01 * alone.std()
