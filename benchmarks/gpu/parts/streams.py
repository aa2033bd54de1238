"""Streams that start together, from one to 1,024, in bfloat16 and FP8."""

from __future__ import annotations

from benchmarks.gpu.context import Context, Rows, release
from benchmarks.gpu.parts.loads import llama, start, streams_row

__all__ = ["measure_streams"]

_FEW = 64
"""Up to so many streams a load runs twice, as the first run may be slower"""


def measure_streams(context: Context, model: str, weights: str, kv_dtype: str = "auto") -> Rows:
    """Yield the speed of 1 to 1,024 streams with prompts and answers of 256 tokens.

    model: a name of LLAMAS; weights, kv_dtype: values of the engine's flags.
    """
    path = llama(context, model)
    prompt, output = context.size((256, 256), (16, 8))
    limits = context.size(
        {"max_running": 1024, "max_step_tokens": 8192}, {"max_running": 8, "max_step_tokens": 64}
    )
    formats = {"weights": weights, "kv_dtype": kv_dtype} if context.on_gpu else {}
    with start(context, path, **limits, **formats) as engine:
        yield {
            "weights": weights,
            "KV type": kv_dtype,
            "KV tokens": engine.model.total_blocks * engine.model.block_size,
        }
        for count in context.size((1, 8, 64, 256, 512, 1024), (1, 4)):
            turns = 1 if count > _FEW else 2
            yield streams_row(engine, count, prompt, output, turns=turns)
    release()
