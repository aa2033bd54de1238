"""Accuracy of bfloat16 and int8 weights against float32: perplexity, KL divergence, argmax.

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
from services.engine.batch.step_batch import StepBatch
from services.engine.model.attention import KVCache
from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model

KINDS = (("float32", "full"), ("bfloat16", "full"), ("bfloat16", "int8"))


def texts(model: Path, length: int, number: int) -> Iterator[Tensor]:
    """Yield the first `length` tokens of `number` files that have as many."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids = tokenizer.encode(file.read_text(errors="replace")).ids
        if len(ids) >= length and number > 0:
            number -= 1
            yield torch.tensor(ids[:length])


def log_probabilities(decoder: Decoder, cache: KVCache, ids: Tensor) -> Tensor:
    """Return the log-probabilities of one prefill, float32 [tokens, vocabulary]."""
    count = len(ids)
    positions = torch.arange(count)
    blocks = -(-count // cache.block_size)
    batch = StepBatch(
        token_ids=ids,
        positions=positions,
        slots=positions,
        query_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lengths=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(blocks, dtype=torch.int32)[None],
        num_decodes=0,
        query_lengths_host=(count,),
        context_lengths_host=(count,),
    )
    return decoder.logits(decoder.forward(batch, cache)).log_softmax(-1)


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
    decoders = [
        load_model(arguments.model, getattr(torch, dtype), weights=weights)
        for dtype, weights in KINDS
    ]
    caches = [
        decoder.allocate_cache(-(-arguments.length // decoder.block_size)) for decoder in decoders
    ]
    losses: list[list[float]] = [[] for _ in KINDS]
    divergences: list[list[Tensor]] = [[] for _ in KINDS]
    agreements: list[list[float]] = [[] for _ in KINDS]
    for ids in texts(arguments.model, arguments.length, arguments.texts):
        exact = log_probabilities(decoders[0], caches[0], ids)
        for index, (decoder, cache) in enumerate(zip(decoders, caches, strict=True)):
            found = log_probabilities(decoder, cache, ids)
            losses[index].append(-found[:-1].gather(1, ids[1:, None]).mean().item())
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
