"""Answers of engines that draft, on the ranks of a group.

Ranks are processes that import this module, so it imports no transformers.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from services.engine.engine import Engine
from services.engine.execution.loaded_model import load
from services.engine.model.lockstep import Follower
from services.engine.ranks.group import RankGroup
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings

__all__ = ["Answers", "answer", "run_rank"]


class Answers(NamedTuple):
    """Greedy answers of an engine."""

    tokens: list[list[int]]
    drafted: dict[str, int]
    """Number of draft tokens by source"""
    block_bytes: int


def run_rank(rank: Rank, port: int, engines: Mapping[str, EngineSettings], out: Path) -> None:
    """Run each engine; rank 0 writes what `answer` returns to the file `out`."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    numbers = rank.number, rank.count, rank.local_number, rank.local_count
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    os.environ |= {name: str(number) for name, number in zip(names, numbers, strict=True)}
    torch.set_num_threads(1)
    ranks = RankGroup.join(rank, torch.device("cpu"))
    found = {}
    with pytest.MonkeyPatch.context() as patch:  # a process joins its group once
        patch.setattr(RankGroup, "join", lambda *_: ranks)
        patch.setattr(RankGroup, "watch", lambda _: None)
        for name, settings in engines.items():
            if rank.leads:
                with Engine(settings.model, settings) as engine:
                    found[name] = answer(engine)
                    ranks.dissolve()
            else:
                model = load(settings)
                Follower(model.decoder, model.cache, ranks).run()
    if rank.leads:
        out.write_text(json.dumps(found))


def answer(engine: Engine) -> Answers:
    """Have an engine answer three prompts."""
    tokens = [
        engine.generate([5, 7, 11, token], max_tokens=60, temperature=0, ignore_eos=True).token_ids
        for token in (1, 2, 3)
    ]
    drafts = engine.loaded.steps.take_output().load.drafts
    return Answers(
        tokens, {each.source: each.drafted for each in drafts}, engine.model.pool_bytes[0]
    )
