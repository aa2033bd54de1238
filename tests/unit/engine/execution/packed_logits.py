"""Logits of models whose packed weights may lie in a cache, on one rank or several.

Ranks are processes that import this module, so it imports no transformers.
"""

import multiprocessing
import os
from pathlib import Path

import torch
from torch import Tensor

from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.execution.packed_cache import open_packed
from services.engine.model.loader import load_model
from services.engine.model.lockstep import Follower
from services.engine.ranks.group import SINGLE_RANK, RankGroup
from services.engine.ranks.rank import Rank
from tests.stack import free_ports
from tests.unit.engine.checkpoints.driver import Driver, random_tokens

RANKS = 2
TOKENS = 20


def logits(
    path: Path,
    cache: Path | None,
    dtype: torch.dtype = torch.float32,
    weights: str = "full",
    ranks: RankGroup = SINGLE_RANK,
) -> tuple[Tensor, bool]:
    """Return rank 0's logits of a prompt, and whether the weights were read from the cache."""
    with opened_checkpoint(path) as directory:
        file = None if cache is None else open_packed(cache, directory, dtype, weights, ranks.rank)
        decoder = load_model(directory, dtype, weights=weights, ranks=ranks, packed=file)
    was_read = file is not None and file.is_read
    if file is not None:
        file.publish().join()
    driver = Driver(decoder, [random_tokens(TOKENS, 1)], block_size=32)
    if not ranks.rank.leads:
        Follower(decoder, driver.cache, ranks).run()
        return torch.empty(0), was_read
    driver.step([(0, TOKENS)])
    if not ranks.rank.is_alone:
        ranks.dissolve()
    return driver.logits[0], was_read


def logits_of_ranks(path: Path, cache: Path, out: Path) -> tuple[Tensor, bool]:
    """Return what `logits` returns on rank 0 of two, which hands it over in the file `out`."""
    [port] = free_ports(1)
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=_run_rank, args=(Rank(n, RANKS, n, RANKS), port, path, cache, out))
        for n in range(RANKS)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    logits, was_read = torch.load(out)
    return logits, was_read


def _run_rank(rank: Rank, port: int, path: Path, cache: Path, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    computed = logits(path, cache, ranks=RankGroup.join(rank, torch.device("cpu")))
    if rank.leads:
        torch.save(computed, out)
