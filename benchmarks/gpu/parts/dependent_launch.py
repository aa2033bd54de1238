"""Decode steps with programmatic dependent launch and without, and the kernels of a layer."""

from __future__ import annotations

import statistics

from benchmarks.engine import MeasuredEngine
from benchmarks.gpu.context import Context, Row, Rows, release
from benchmarks.gpu.parts.answers import Answer, Question, answer, differences
from benchmarks.gpu.parts.kernel_counts import profile_steps
from benchmarks.gpu.parts.loads import llama, some_ids

__all__ = ["compare_launches"]

_PROFILED_STEPS = 20
_MEAN_NATS = 0.05
"""Bound of the mean difference of log-probabilities: two starts may choose different products"""


def compare_launches(context: Context, model: str, weights: str = "full") -> Rows:
    """Yield the times of steps with dependent launches and without, and how far answers differ.

    model: a name of LLAMAS; weights: a value of the engine's flag. A kernel that did not wait for
    the one before would compute with numbers of another layer.
    """
    if context.on_gpu:
        context.require_capability(9, 0, "programmatic dependent launch")
    path = llama(context, model)
    length, steps, questions, output = context.size((1024, 200, 16, 64), (70, 4, 2, 4))
    counts = context.size((1, 8, 64), (1, 3))
    room = (max(counts) + questions) * (length + steps + output + 256)
    answers: list[Answer] = []
    for is_dependent in (True, False):
        with MeasuredEngine(
            path,
            "auto",
            room,
            weights=weights if context.on_gpu else "full",
            device=context.device.type,
            dependent_launch=is_dependent,
        ) as engine:
            for count in counts:
                with engine.decoding(count, length, steps + _PROFILED_STEPS + 16) as step:
                    for _ in range(min(8, steps)):
                        step()
                    median = statistics.median(step() for _ in range(steps))
                    seen = profile_steps(context, step, _PROFILED_STEPS)
                names: Row = {"dependent": is_dependent, "streams": count}
                yield {**names, "ms a step": 1000 * median, **seen.summary()}
                if context.on_gpu and count == 1:
                    yield from seen.rows(engine.loaded.model.decoder.spec.num_layers, names)
            if answers:
                found = differences(engine, answers)
                mean = sum(found) / len(found)
                yield {"mean nats between both": mean, "most": max(found), "ok": mean <= _MEAN_NATS}
            else:
                prompts = [some_ids(engine, length, number) for number in range(questions)]
                answers, _ = answer(engine, [Question(each) for each in prompts], output)
        release()
