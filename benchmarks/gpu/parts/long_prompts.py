"""Prompts whose attention dominates, and what a long context costs the streams beside it."""

from __future__ import annotations

from benchmarks.gpu.context import Context, Rows, release
from benchmarks.gpu.parts.loads import complete, first_token, llama, some_ids, start

__all__ = ["measure_long_prompts"]


def measure_long_prompts(context: Context, model: str = "8b") -> Rows:
    """Yield times to the first token by length, and step times with and without a neighbour."""
    length = context.size(131072, 1024)
    path = llama(context, model, max_position_embeddings=length)
    with start(context, path) as engine:
        for tokens in context.size((512, 2048, 8000, 32000, 64000, 128000), (200,)):
            yield first_token(engine, tokens)
        streams, prompt, output = context.size((255, 256, 64), (3, 16, 8))
        long = context.size(20000, 200)
        short = [some_ids(engine, prompt, number) for number in range(streams)]
        neighbour = some_ids(engine, long, "long")
        for _ in range(2):
            alone = complete(engine, short, output)
            beside = complete(engine, [neighbour, *short], output)
        yield {
            "streams": streams,
            "ms a step": 1000 * alone.step_seconds,
            f"beside a context of {long}": 1000 * beside.step_seconds,
            "ratio": beside.step_seconds / alone.step_seconds,
        }
    release()
