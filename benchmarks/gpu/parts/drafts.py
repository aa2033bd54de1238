"""Speculation by n-grams: a stream that repeats itself, and its neighbours."""

from __future__ import annotations

from benchmarks.gpu.context import Context, Rows, release
from benchmarks.gpu.parts.loads import complete, llama, some_ids, start

__all__ = ["measure_drafts"]


def measure_drafts(context: Context, model: str = "8b") -> Rows:
    """Yield the speed of repetitive prompts without and with drafts, alone and beside others."""
    path = llama(context, model)
    phrase, repeats, output = context.size((64, 8, 128), (8, 4, 8))
    streams, prompt = context.size((63, 256), (3, 16))
    for speculate in ("off", "ngram"):
        with start(context, path, speculate=speculate) as engine:
            repetitive = some_ids(engine, phrase, "phrase") * repeats
            others = [some_ids(engine, prompt, number) for number in range(streams)]
            for name, prompts in (
                ("one repetitive stream", [repetitive]),
                (f"beside {streams} others", [repetitive, *others]),
            ):
                complete(engine, prompts, output)
                run = complete(engine, prompts, output)
                yield {
                    "--speculate": speculate,
                    "load": name,
                    "tokens/s": run.rate,
                    "ms a step": 1000 * run.step_seconds,
                }
        release()
