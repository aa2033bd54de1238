"""Accuracy of weights, or of cached keys and values, against float32: perplexity, KL, argmax.

    python -m benchmarks.accuracy --model models/tokenwire-code-6m
    python -m benchmarks.accuracy --model SmolLM2-135M-Instruct.Q4_1.gguf --codes
    python -m benchmarks.accuracy --model SmolLM2-135M-Instruct.Q4_1.gguf --caches

The texts are the standard library's source files: every machine has them.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.tables import markdown
from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.engine import Engine
from services.engine.kernels.library import InstructionSet, instruction_set
from services.engine.settings import EngineSettings

Kind = tuple[str, str, str]
"""--dtype, --weights and --kv-dtype"""
WEIGHTS: Sequence[Kind] = (
    ("float32", "decoded", "auto"),
    ("bfloat16", "full", "auto"),
    ("bfloat16", "int8", "auto"),
    ("bfloat16", "int4", "auto"),
    *([("bfloat16", "w8a8", "auto")] if instruction_set() is InstructionSet.AMX else []),
    ("float32", "int8", "auto"),
    ("float32", "int4", "auto"),
)
CODES: Sequence[Kind] = (
    ("float32", "decoded", "auto"),
    ("float32", "full", "auto"),
    ("bfloat16", "full", "auto"),
)
CACHES: Sequence[Kind] = tuple(
    ("float32", "decoded", kv) for kv in ("float32", "float16", "bfloat16", "int8")
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
    parser.add_argument(
        "--model", type=Path, required=True, help="a Hugging Face directory, or a GGUF file"
    )
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--codes", action="store_true", help="compare products of stored codes with decoded weights"
    )
    group.add_argument(
        "--caches", action="store_true", help="compare types of cached keys and values"
    )
    parser.add_argument("--length", type=int, default=1024, help="tokens of each text")
    parser.add_argument("--texts", type=int, default=24, help="number of texts")
    arguments = parser.parse_args()
    kinds = CACHES if arguments.caches else CODES if arguments.codes else WEIGHTS
    with opened_checkpoint(arguments.model) as directory:
        compare(directory, kinds, arguments.length, arguments.texts)


def compare(model: Path, kinds: Sequence[Kind], length: int, number: int) -> None:
    engines = [
        Engine(
            model,
            EngineSettings(
                dtype=dtype, weights=weights, kv_dtype=kv, device="cpu", kv_memory=KV_MEMORY
            ),
        )
        for dtype, weights, kv in kinds
    ]
    losses: list[list[float]] = [[] for _ in kinds]
    divergences: list[list[Tensor]] = [[] for _ in kinds]
    agreements: list[list[float]] = [[] for _ in kinds]
    for ids in texts(model, length, number):
        exact = engines[0].log_probabilities(ids)
        following = torch.tensor(ids[1:])[:, None]
        for index, engine in enumerate(engines):
            found = engine.log_probabilities(ids)
            losses[index].append(-found[:-1].gather(1, following).mean().item())
            divergences[index].append((exact.exp() * (exact - found)).sum(-1))
            agreements[index].append((found.argmax(-1) == exact.argmax(-1)).float().mean().item())
    rows = [
        ["computed in", "weights", "cache", "perplexity", "KL, mean", "KL, max", "same best token"]
    ]
    for index, kind in enumerate(kinds):
        divergence = torch.cat(divergences[index])
        rows.append(
            [
                *kind,
                f"{math.exp(sum(losses[index]) / len(losses[index])):.4f}",
                f"{divergence.mean():.2e}",
                f"{divergence.max():.2e}",
                f"{sum(agreements[index]) / len(agreements[index]):.2%}",
            ]
        )
    print(f"{len(losses[0])} texts of {length} tokens; KL against float32\n")
    print(markdown(rows))


if __name__ == "__main__":
    main()
