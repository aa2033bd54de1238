"""One of the ranks that hold a model together, for a check with a single card.

    RANK=0 WORLD_SIZE=2 … python -m benchmarks.gpu.rank_process QUESTIONS.json

Rank 0 answers the questions and writes what it finds to the file's place with the suffix .answers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.gpu.parts.answers import Question, answer
from services.engine.engine import Engine
from services.engine.loop import follower_process
from services.engine.ranks.all_reduce import AllReduce
from services.engine.ranks.rank import Rank
from services.engine.settings import EngineSettings

__all__ = ["main"]


def main() -> None:
    """Compute the answers with the other ranks."""
    file = Path(sys.argv[1])
    order = json.loads(file.read_text())
    settings = EngineSettings(
        model=Path(order["checkpoint"]),
        dtype=order["dtype"],
        device=order["device"],
        kv_memory="128MiB",
    )
    torch.set_grad_enabled(False)
    with _over_gloo() if order["collectives"] == "gloo" else ExitStack():
        if not Rank.from_environment().leads:
            follower_process.run(settings)
        with Engine(settings.model, settings) as engine:
            questions = [Question(prompt) for prompt in order["prompts"]]
            answers, _ = answer(engine, questions, order["output"])
            engine.loaded.model.ranks.dissolve()
    found = [(each.tokens, each.logprobs) for each in answers]
    file.with_suffix(".answers").write_text(json.dumps(found))


@contextmanager
def _over_gloo() -> Iterator[None]:
    """Let ranks on one card sum over gloo, whose sums can't be captured in CUDA graphs."""
    init = dist.init_process_group

    def init_gloo(backend: str, *, device_id: object = None, **options: Any) -> None:
        init("gloo", **options)

    with ExitStack() as stack:
        stack.enter_context(patch.object(dist, "init_process_group", init_gloo))
        chosen = "services.engine.ranks.group.choose_all_reduce"
        stack.enter_context(patch(chosen, lambda *_: AllReduce()))
        name = "services.engine.execution.loaded_model.graph_capacity"
        stack.enter_context(patch(name, return_value=None))
        yield


if __name__ == "__main__":
    main()
