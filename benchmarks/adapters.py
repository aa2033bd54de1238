"""Times of decode steps whose rows have LoRA adapters, beside those of the model alone.

python -m benchmarks.adapters --model ~/.cache/tokenwire-bench/models/bench-350m
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.tables import markdown
from services.engine.batch.step_batch import StepBatch
from services.engine.frontend.child_process import limit_thread_spinning
from services.engine.model.adapters.peft_files import LowRankPair, PeftAdapter
from services.engine.model.attention import KVCache
from services.engine.model.loader import load_model, resolve_dtype
from services.engine.model.model import Model

_CONTEXT = 256


def random_adapter(decoder: Model, rank: int, seed: int) -> PeftAdapter:
    """Make an adapter of all layers that may have one."""
    assert decoder.adapters is not None
    generator = torch.Generator().manual_seed(seed)
    pairs = {
        name: LowRankPair(
            torch.randn(rank, inputs, generator=generator) / inputs**0.5,
            torch.randn(outputs, rank, generator=generator) / 100,
            1.0,
        )
        for name, inputs, outputs in decoder.adapters.layers()
    }
    return PeftAdapter(pairs)


def decode_batch(decoder: Model, cache: KVCache, adapters: Sequence[int]) -> StepBatch:
    """Return a step in which each sequence decodes one token; adapters: theirs, by number."""
    count, size = len(adapters), cache.block_size
    width = -(-_CONTEXT // size)
    tables = torch.arange(count * width, dtype=torch.int32).view(count, width)
    positions = torch.full((count,), _CONTEXT - 1)
    return StepBatch(
        token_ids=torch.arange(count) % decoder.spec.vocab_size,
        positions=positions,
        slots=tables[:, -1].long() * size + positions % size,
        query_starts=torch.arange(count + 1, dtype=torch.int32),
        context_lengths=torch.full((count,), _CONTEXT, dtype=torch.int32),
        block_tables=tables,
        num_decodes=count,
        query_lengths_host=(1,) * count,
        context_lengths_host=(_CONTEXT,) * count,
        adapters_host=tuple(adapters) if any(adapters) else (),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    decoder = load_model(options.model, resolve_dtype("auto"))
    assert decoder.adapters is not None
    for number in range(1, options.adapters + 1):
        decoder.adapters.load(number, random_adapter(decoder, options.rank, number))
    cache = decoder.allocate_cache(options.streams * -(-_CONTEXT // decoder.block_size))
    kinds = {
        "no adapter": [0] * options.streams,
        "one adapter": [1] * options.streams,
        f"{options.adapters} adapters": [
            1 + stream % options.adapters for stream in range(options.streams)
        ],
    }
    batches = {name: decode_batch(decoder, cache, numbers) for name, numbers in kinds.items()}
    times: dict[str, list[float]] = {name: [] for name in batches}
    for step in range(options.steps + 2):
        for name, batch in batches.items():
            began = time.perf_counter()
            decoder.logits(decoder.forward(batch, cache))
            if step > 1:
                times[name].append(time.perf_counter() - began)
    medians = {name: statistics.median(spent) for name, spent in times.items()}
    alone = medians["no adapter"]
    rows = [["rows", "ms/step", "speed against none"]]
    rows += [[name, f"{1000 * m:.1f}", f"{alone / m:.2f}"] for name, m in medians.items()]
    print(markdown(rows))


if __name__ == "__main__":
    limit_thread_spinning()
    main()
