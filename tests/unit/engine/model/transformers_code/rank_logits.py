"""Logits of small models on transformers' modules, on one rank or several.

Ranks are processes that import this module, so it imports no configs and no PEFT.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from services.engine.execution.adapter_files import convert_adapter
from services.engine.execution.model_loader import load_any_model
from services.engine.execution.model_runner import ModelRunner
from services.engine.model.lockstep import Follower
from services.engine.ranks.group import SINGLE_RANK, RankGroup
from services.engine.ranks.rank import Rank
from tests.unit.engine.checkpoints.driver import Driver, random_tokens

TOKENS = 60
ADAPTED = ("helium", "gpt-neox")
WIDE = "helium, in tiles"


def run_rank(rank: Rank, port: int, checkpoints: dict[str, Path], out: Path) -> None:
    """Compute the logits of each checkpoint; rank 0 saves them in the file `out`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, torch.device("cpu"))
    computed = {name: compute(name, path, ranks) for name, path in checkpoints.items()}
    if rank.leads:
        torch.save(computed, out)


def compute(name: str, path: Path, ranks: RankGroup = SINGLE_RANK) -> list[Tensor]:
    """Return rank 0's logits at most positions: prefilled at once, in chunks, and decoded."""
    dtype = torch.bfloat16 if name == WIDE else torch.float32
    model = load_any_model(path, dtype, "transformers", ranks=ranks)
    adapters = [2, 0, 1] if name in ADAPTED else []
    driver = Driver(model, [random_tokens(TOKENS, seed) for seed in range(3)], adapters=adapters)
    if not ranks.rank.leads:
        Follower(
            model, driver.cache, ranks, read_adapter=lambda folder: convert_adapter(model, folder)
        ).run()
        return []
    runner = ModelRunner(model, driver.cache)
    for number in sorted(set(adapters) - {0}):
        runner.read_adapter(number, path / str(number))
        runner.insert_adapter(number)
    driver.step([(0, TOKENS)])
    driver.step([(1, 40), (2, 17)], kept=[1, 9])
    for _ in range(8):
        driver.step([(1, 1), (2, 1)])
    if ranks.leads_others:
        ranks.dissolve()
    return [logits[~logits.isnan().any(dim=1)] for logits in driver.logits]
