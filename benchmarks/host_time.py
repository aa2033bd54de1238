"""Host time of decode steps: the engine's Python, with a model that computes nothing.

    python -m benchmarks.host_time

A step is counted from its plan to the bytes that go to the gRPC process. That includes the plan,
the batch's integers, the draws from 256 logits per stream, the request table and the framing. It
excludes the decoder, copies to a device and the gRPC process. All figures are CPU time of the
loop's thread, so that other processes change them little. On a GPU this time passes while the
device computes the step before, and is lost only where it is longer.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.engine import Stopwatch
from benchmarks.tables import markdown
from services.common.json_values import Json
from services.engine.batch.step_batch import StepBatch
from services.engine.checked_request import CheckedRequest, SamplingSettings, StoppingSettings
from services.engine.execution.model_runner import ModelRunner, StepCapacity
from services.engine.framing import pack
from services.engine.loop.request_table import LoopLimits
from services.engine.loop.step_loop import StepLoop
from services.engine.loop.step_sampler import StepSampler
from services.engine.messages import AddRequest
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.attention import KVCache
from services.engine.model.decoder import Decoder
from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.step_plan import SchedulerLimits

STREAMS = (1, 64, 256)
CONTEXT = 4096
PROMPT = 128
BLOCK = 64
STEPS = 400
WARM_UP_STEPS = 20
SAMPLINGS = {
    "greedy": SamplingSettings(0.0, 1.0, 0, 0.0, 1),
    "top-p": SamplingSettings(0.7, 0.9, 0, 0.0, 1),
}
_CONFIG: dict[str, Json] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 256,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
}


class IdleDecoder(Decoder):
    """A decoder whose hidden states and logits are constant."""

    runs_alone = False

    def __init__(self, rows: int) -> None:
        """rows: upper bound of the rows of a step."""
        self.spec = ModelSpec.from_config(_CONFIG)
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.block_size = BLOCK
        self._hidden = torch.zeros(rows, self.spec.hidden_size)
        self._constant = torch.rand(rows, self.spec.vocab_size)
        self.adapters = None

    @property
    def has_argmax(self) -> bool:
        return False

    def reserve(self, tokens: int, rows: int) -> None:
        pass

    def compute(self, batch: StepBatch, cache: KVCache) -> Tensor:
        return self._hidden[: len(batch.token_ids)]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._constant[: len(hidden)]


@dataclass(frozen=True, slots=True)
class HostTime:
    """Time of decode steps of `streams` sequences."""

    streams: int
    sampling: str
    overlaps: bool
    """True if steps overlap and are padded, as on a GPU"""
    step_ms: float
    """Median"""
    step_ms_p90: float
    parts_ms: Mapping[str, float]
    """Mean milliseconds per step, from separate steps, because timing the parts slows a step"""


def measure(streams: int, sampling: str, overlaps: bool, steps: int = STEPS) -> HostTime:
    loop = _loop(streams, overlaps)
    loop.apply([_request(handle, SAMPLINGS[sampling]) for handle in range(streams)])
    while loop.step(tuple).load.waiting or loop.had_prompts:
        pass
    _run(loop, WARM_UP_STEPS)
    times = _run(loop, steps)
    watch = Stopwatch(time.thread_time)
    with _watched(watch):
        watched = _run(loop, steps)
    parts = {part: 1000 * spent / steps for part, spent in watch.seconds.items()}
    parts["rest"] = 1000 * sum(watched) / steps - sum(parts.values())
    return HostTime(
        streams,
        sampling,
        overlaps,
        1000 * statistics.median(times),
        1000 * statistics.quantiles(times, n=10)[-1],
        parts,
    )


def _loop(streams: int, overlaps: bool) -> StepLoop:
    rows = CONTEXT + 2 * streams
    decoder = IdleDecoder(rows)
    blocks = streams * CONTEXT // BLOCK
    limits = SchedulerLimits(streams, CONTEXT, 1.7, rows_at_once=32)
    cache = KVCache({0: torch.zeros(blocks + 1)}, {0: torch.zeros(blocks + 1)}, BLOCK)
    capacity = StepCapacity(rows, streams, CONTEXT // BLOCK) if overlaps else None
    return StepLoop(
        Scheduler(limits, CachePools(CacheLimits(BLOCK, (GroupLimits(blocks),)))),
        ModelRunner(decoder, cache, capacity),
        LoopLimits(frozenset({0}), streams),
        overlaps=overlaps,
    )


def _request(handle: int, sampling: SamplingSettings) -> AddRequest:
    stopping = StoppingSettings(CONTEXT, 0, True, CONTEXT, frozenset())
    checked = CheckedRequest([[handle] * PROMPT], 1, sampling, stopping, None, None, (), False)
    return AddRequest(handle, checked, None, b"", 0, time.monotonic())


def _run(loop: StepLoop, steps: int) -> list[float]:
    """Run steps. Return the seconds of each."""
    times = []
    gc.collect()
    for _ in range(steps):
        began = time.thread_time()
        pack(loop.step(tuple))
        times.append(time.thread_time() - began)
    return times


@contextmanager
def _watched(watch: Stopwatch) -> Iterator[None]:
    """Time the parts of a step."""
    parts: tuple[tuple[str, type[object], tuple[str, ...]], ...] = (
        ("plan", Scheduler, ("plan", "learn")),
        ("batch", ModelRunner, ("forward",)),
        ("draws", StepSampler, ("draws", "compute", "rows")),
        ("tokens", StepLoop, ("_complete", "_draw")),
    )
    with ExitStack() as patches:
        for part, kind, names in parts:
            for name in names:
                timed = watch.timed(part, vars(kind)[name])
                patches.enter_context(patch.object(kind, name, timed))
        patches.enter_context(patch(f"{__name__}.pack", watch.timed("framing", pack)))
        yield


def describe(cases: Sequence[HostTime]) -> str:
    """Return the cases as a table."""
    parts = list(dict.fromkeys(part for case in cases for part in case.parts_ms))
    rows = [
        ["streams", "sampling", "overlap", "ms/step", "p90", *(f"{part}, ms" for part in parts)]
    ]
    rows += [
        [
            f"{case.streams}",
            case.sampling,
            "yes" if case.overlaps else "no",
            f"{case.step_ms:.3f}",
            f"{case.step_ms_p90:.3f}",
            *(f"{case.parts_ms.get(part, 0.0):.3f}" for part in parts),
        ]
        for case in cases
    ]
    return markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument("--steps", type=int, default=STEPS)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    cases = [
        measure(streams, sampling, overlaps, arguments.steps)
        for overlaps in (True, False)
        for sampling in SAMPLINGS
        for streams in arguments.streams
    ]
    print(describe(cases))


if __name__ == "__main__":
    main()
