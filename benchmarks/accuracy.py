"""Accuracy of bfloat16, int8 and int4 weights against float32: perplexity, KL divergence, argmax.

    python -m benchmarks.accuracy --model models/tokenwire-code-6m

The texts are the standard library's source files: every machine has them.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.tables import markdown
from services.engine.engine import Engine
from services.engine.kernels.library import InstructionSet, instruction_set
from services.engine.settings import EngineSettings

KINDS = (
    ("float32", "decoded"),
    ("bfloat16", "full"),
    ("bfloat16", "int8"),
    ("bfloat16", "int4"),
    *([("bfloat16", "w8a8")] if instruction_set() is InstructionSet.AMX else []),
    ("float32", "int8"),
    ("float32", "int4"),
)
KV_MEMORY = "64MiB"
"""Of each engine; its own KV cache is not used"""


def texts(model: Path, length: int, number: int) -> Iterator[list[int]]:
    """The first `length` tokens of each of `number` files that are that long."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids = tokenizer.encode(file.read_text(errors="replace")).ids
        if len(ids) >= length and number > 0:
            number -= 1
            yield ids[:length]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.accuracy",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a Hugging Face directory")
    parser.add_argument("--length", type=int, default=1024, help="tokens of each text")
    parser.add_argument("--texts", type=int, default=24, help="number of texts")
    arguments = parser.parse_args()
    engines = [
        Engine(
            arguments.model,
            EngineSettings(dtype=dtype, weights=weights, device="cpu", kv_memory=KV_MEMORY),
        )
        for dtype, weights in KINDS
    ]
    losses: list[list[float]] = [[] for _ in KINDS]
    divergences: list[list[Tensor]] = [[] for _ in KINDS]
    agreements: list[list[float]] = [[] for _ in KINDS]
    for ids in texts(arguments.model, arguments.length, arguments.texts):
        exact = engines[0].log_probabilities(ids)
        following = torch.tensor(ids[1:])[:, None]
        for index, engine in enumerate(engines):
            found = engine.log_probabilities(ids)
            losses[index].append(-found[:-1].gather(1, following).mean().item())
            divergences[index].append((exact.exp() * (exact - found)).sum(-1))
            agreements[index].append((found.argmax(-1) == exact.argmax(-1)).float().mean().item())
    rows = [["computed in", "weights", "perplexity", "KL, mean", "KL, max", "same best token"]]
    for index, (dtype, weights) in enumerate(KINDS):
        divergence = torch.cat(divergences[index])
        rows.append(
            [
                *(dtype, weights),
                f"{math.exp(sum(losses[index]) / len(losses[index])):.4f}",
                f"{divergence.mean():.2e}",
                f"{divergence.max():.2e}",
                f"{sum(agreements[index]) / len(agreements[index]):.2%}",
            ]
        )
    print(f"{len(losses[0])} texts of {arguments.length} tokens; KL against float32\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
