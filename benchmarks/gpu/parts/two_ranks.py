"""Tensor parallelism on one card: two ranks share it, beside float32 on the CPU.

NCCL refuses two ranks on one card. So the sums travel over gloo by way of the host, without CUDA
graphs: the part checks how weights, heads and experts are divided, not how fast ranks are.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from benchmarks.gpu.checkpoints import FAMILIES
from benchmarks.gpu.context import Context, Row, Rows
from benchmarks.gpu.parts.answers import Answer, Question, differences, exact_engine, verdict
from benchmarks.gpu.parts.once import some_prompts
from benchmarks.processes import free_port
from services.engine.model.loader import load_spec

__all__ = ["check_two_ranks"]

_RANKS = 2
_OUTPUT = 16
_SECONDS = 120.0
"""Longest time of the ranks, from their start to their end"""


class _RanksFailedError(Exception):
    """The ranks did not answer; the message is what the first one said."""


def check_two_ranks(context: Context) -> Rows:
    """Compare families over gloo, after an attempt over NCCL, whose refusal is a result."""
    if context.on_gpu:
        try:
            yield _check(context, "llama", "nccl")
        except _RanksFailedError as error:
            yield {"collectives": "nccl", "family": "llama", "refusal": str(error)}
    for family in context.size(("llama", "qwen3 moe"), ("llama",)):
        yield _check(context, family, "gloo")


def _check(context: Context, family: str, collectives: str) -> Row:
    path = context.checkpoint(f"family-{family}", FAMILIES[family], small=True)
    answers = _answers(context, path, collectives)
    with exact_engine(path) as exact:
        found = differences(exact, answers)
    has_experts = load_spec(path).has_experts
    return {"collectives": collectives, "family": family, **verdict(found, has_experts=has_experts)}


def _answers(context: Context, path: Path, collectives: str) -> list[Answer]:
    """Return what the ranks answer. Raises _RanksFailedError."""
    prompts = some_prompts(7, 64, 300)
    order = {
        "checkpoint": str(path),
        "dtype": "bfloat16" if context.on_gpu else "float32",
        "device": context.device.type,
        "collectives": collectives,
        "prompts": prompts,
        "output": _OUTPUT,
    }
    with TemporaryDirectory() as folder:
        file = Path(folder) / "questions.json"
        file.write_text(json.dumps(order))
        _run_ranks(file)
        found = json.loads(file.with_suffix(".answers").read_text())
    pairs = zip(prompts, found, strict=True)
    return [Answer(Question(prompt), *rest) for prompt, rest in pairs]


def _run_ranks(file: Path) -> None:
    """Run both ranks on device 0 to their ends."""
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(_RANKS),
        "LOCAL_WORLD_SIZE": str(_RANKS),
        "LOCAL_RANK": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-m", "benchmarks.gpu.rank_process", str(file)]
    with ExitStack() as stack:
        logs = [stack.enter_context(TemporaryFile("w+")) for _ in range(_RANKS)]
        ranks = [
            subprocess.Popen(
                command,
                env=environment | {"RANK": str(number)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for number, log in enumerate(logs)
        ]
        try:
            codes = [rank.wait(_SECONDS) for rank in ranks]
        except subprocess.TimeoutExpired:
            codes = []
        finally:
            for rank in ranks:
                rank.kill()
        if codes != [0] * _RANKS:
            raise _RanksFailedError("; ".join(map(_last_words, logs)) or "they hung")


def _last_words(log: IO[str]) -> str:
    log.seek(0)
    return " ".join(log.read().split())[-400:]
