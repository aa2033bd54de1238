"""Logits of GGUF files on one rank or several, with weights in memory or mapped.

Ranks are processes that import this module, so it imports no transformers.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.model.loader import load_model
from services.engine.model.lockstep import Follower
from services.engine.ranks.group import SINGLE_RANK, RankGroup
from services.engine.ranks.rank import Rank
from tests.unit.engine.checkpoints.driver import Driver, random_tokens

TOKENS = 20


def run_rank(rank: Rank, port: int, folder: Path, names: Sequence[str]) -> None:
    """Compute the logits of each model in the folder, and save them in its file `logits`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, torch.device("cpu"))
    computed = {
        (name, weights): compute(folder / f"{name}.gguf", weights, ranks)
        for name in names
        for weights in ("full", "mapped")
    }
    if rank.leads:
        torch.save(computed, folder / "logits")


def compute(path: Path, weights: str, ranks: RankGroup = SINGLE_RANK) -> Tensor:
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
