"""Speed of families with other layers than Llama's, in a few layers of real shapes."""

from __future__ import annotations

from benchmarks.gpu.checkpoints import FAMILIES, SHAPES
from benchmarks.gpu.context import Context, Rows, release
from benchmarks.gpu.parts.loads import first_token, start, streams_row

__all__ = ["measure_family"]

_SMALL = {
    "qwen3 moe": "qwen3 moe",
    "qwen3.5": "qwen3.5, gated delta net",
    "deepseek v2": "deepseek v2, latents",
}
"""Small family that stands for a shape in a dry run"""


def measure_family(context: Context, shape: str, weights: str = "full") -> Rows:
    """Yield the speed of streams and the time of prompts.

    shape: a name of SHAPES; weights: a value of the engine's flag.
    """
    if context.is_dry:
        name = _SMALL[shape]
        path = context.checkpoint(f"family-{name}", FAMILIES[name], small=True)
    else:
        path = context.checkpoint(f"shape-{shape}", SHAPES[shape])
    options = {"weights": weights} if context.on_gpu else {}
    prompt, output = context.size((256, 128), (16, 8))
    with start(context, path, **options) as engine:
        for count in context.size((1, 8, 64, 256), (2,)):
            yield {"weights": weights, **streams_row(engine, count, prompt, output)}
        for tokens in context.size((512, 4096), (64,)):
            yield {"weights": weights, **first_token(engine, tokens)}
    release()
