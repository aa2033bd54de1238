"""A KV cache in FP8 beside one in the model's type: answers, speed and the tokens that fit."""

from __future__ import annotations

from benchmarks.gpu.context import Context, Rows, release
from benchmarks.gpu.parts.answers import Answer, Question, answer, differences
from benchmarks.gpu.parts.loads import llama, some_ids, start, streams_row

__all__ = ["compare_kv_types"]

_MEAN_NATS = 0.1
"""Bound of the mean change of log-probabilities; random weights depend on keys more than others"""


def compare_kv_types(context: Context, model: str = "8b") -> Rows:
    """Yield the streams' speed over both caches, and how far log-probabilities are from each other.

    A dry run has int8, the narrow type of a CPU, in place of FP8.
    """
    path = llama(context, model)
    loads = context.size(((256, 256, 256), (64, 4000, 128)), ((3, 16, 8),))
    questions, length, output = context.size((16, 1000, 64), (2, 40, 4))
    if context.on_gpu:
        context.require_capability(8, 9, "a cache in FP8")
    answers: list[Answer] = []
    for kv_dtype in ("auto", "fp8" if context.on_gpu else "int8"):
        with start(context, path, kv_dtype=kv_dtype, max_running=256) as engine:
            yield {
                "KV type": kv_dtype,
                "KV tokens": engine.model.total_blocks * engine.model.block_size,
            }
            for load in loads:
                yield {"KV type": kv_dtype, **streams_row(engine, *load)}
            if not answers:
                prompts = [some_ids(engine, length, number) for number in range(questions)]
                answers, _ = answer(engine, [Question(each) for each in prompts], output)
            else:
                found = differences(engine, answers)
                mean = sum(found) / len(found)
                yield {
                    "KV type": kv_dtype,
                    "mean nats from the model's type": mean,
                    "most": max(found),
                    "ok": mean <= _MEAN_NATS,
                }
        release()
