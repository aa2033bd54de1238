"""LoRA adapters: one stream among many, all streams, and several adapters at once."""

from __future__ import annotations

from benchmarks.adapters import random_adapter
from benchmarks.gpu.context import Context, Row, Rows, release
from benchmarks.gpu.parts.loads import complete, llama, some_ids, start

__all__ = ["measure_adapters"]

_RANK = 16
_ADAPTERS = 4
_LEAST_SHARE = 0.9
"""Least speed with one adapted stream, as a share of the speed without"""


def measure_adapters(context: Context, model: str = "8b") -> Rows:
    """Yield the speed of streams with adapters, and its share of that without."""
    path = llama(context, model)
    streams, prompt, output = context.size((64, 256, 128), (4, 16, 8))
    # An engine that starts with adapters captures graphs of steps with them; these come later.
    with start(context, path, adapters="later=later") as engine:
        decoder = engine.loaded.model.decoder
        assert decoder.adapters is not None
        for number in range(1, _ADAPTERS + 1):
            decoder.adapters.load(number, random_adapter(decoder, _RANK, number))
        loads: dict[str, dict[int, int]] = {
            "no adapter": {},
            "one stream with an adapter": {0: 1},
            "all streams with one adapter": dict.fromkeys(range(streams), 1),
            f"all streams with {_ADAPTERS} adapters": {
                stream: 1 + stream % _ADAPTERS for stream in range(streams)
            },
        }
        alone, ungraphed = 0.0, 0
        for name, adapters in loads.items():
            for turn in range(2):
                prompts = [some_ids(engine, prompt, (turn, each)) for each in range(streams)]
                run = complete(engine, prompts, output, adapters=adapters)
            alone = alone or run.rate
            load = engine.loaded.steps.take_output().load
            row: Row = {
                "streams": streams,
                "load": name,
                "tokens/s": run.rate,
                "ms a step": 1000 * run.step_seconds,
                "share": run.rate / alone,
                "steps without a graph": load.ungraphed_steps - ungraphed,
            }
            if len(adapters) == 1 and context.on_gpu:
                row["ok"] = run.rate >= _LEAST_SHARE * alone
            ungraphed = load.ungraphed_steps
            yield row
    release()
