"""On a GPU, prompts and streams share steps so that neither throughput nor latency suffers.

A fake clock stands in for the GPU. The real scheduler plans each step.
"""

import random
from dataclasses import dataclass
from itertools import count
from statistics import fmean

import pytest

from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, TokenSequence
from services.engine.scheduling.step_plan import SchedulerLimits, StepPlan
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine.tiny import make_request

STREAMS = 64
BLOCK = 64
ROWS = 256
"""Rows at once of the operators on CUDA"""
FACTOR = 1.7
"""Default of --mixed-step-factor"""
BUDGETS = (256, 512, 1024, 4096)
"""Prompt tokens of a step, of the policies that never adapt"""
STEPS, WARM_UP_STEPS = 700, 250


@dataclass(frozen=True)
class Gpu:
    """Times of a model's steps, in seconds."""

    weights: float
    """Reading the weights, the least time of a step"""
    row: float
    """Computing one token in the products of all layers"""
    context: float
    """Reading the keys and values of one stream"""
    launches: float
    """Launching a step with prompts kernel by kernel; a graph launches the other steps"""

    def seconds(self, plan: StepPlan) -> float:
        rows = plan.decode_tokens + plan.prompt_tokens
        busy = max(self.weights, rows * self.row) + plan.decode_tokens * self.context
        return max(busy, self.launches) if plan.prompt_tokens else busy


SHAPES = {
    "8B": Gpu(weights=6e-3, row=30e-6, context=15e-6, launches=16e-3),
    "1B": Gpu(weights=1e-3, row=4.5e-6, context=4e-6, launches=7e-3),
    "8B in pieces": Gpu(weights=6e-3, row=30e-6, context=15e-6, launches=3e-3),
    "1B in pieces": Gpu(weights=1e-3, row=4.5e-6, context=4e-6, launches=1.5e-3),
}
"""Two models on a large card, whose steps with prompts are launched by kernels or by graphs"""


@dataclass(frozen=True)
class Outcome:
    tokens_per_second: float
    first_token_seconds: float
    """Mean time from the arrival of a request to its first token"""


def serve(gpu: Gpu, *, prompt: int = 256, budget: int | None = None) -> Outcome:
    """Serve a closed loop of streams that end and start at different times.

    budget: compute this many prompt tokens in each step, whatever they cost; None = adapt.
    """
    limits = SchedulerLimits(
        max_running=256,
        max_step_tokens=budget or 4096,
        mixed_step_factor=1e6 if budget else FACTOR,
        rows_at_once=ROWS,
        prompts_have_fixed_cost=True,
    )
    scheduler = Scheduler(
        limits, CachePools(CacheLimits(BLOCK, (GroupLimits(2 * STREAMS * 1024 // BLOCK),)))
    )
    lengths = random.Random(1)
    handles = count()
    now = 0.0
    arrivals: dict[TokenSequence, float] = {}
    firsts: list[float] = []

    def add(output: int) -> None:
        handle = next(handles)
        ids = [handle] * prompt
        request = Request(make_request(handle, [ids], max_tokens=output, arrival=now))
        sequence = TokenSequence(request, 0, Prompt(ids, b"", BLOCK), None, output)
        scheduler.add(sequence)
        arrivals[sequence] = now

    for stream in range(STREAMS):
        add(6 * stream + 6)
    tokens, began = 0, 0.0
    for step in range(STEPS):
        if step == WARM_UP_STEPS:
            tokens, began = 0, now
            firsts.clear()
        plan = scheduler.plan(now)
        took = gpu.seconds(plan)
        now += took
        scheduler.learn(plan, took)
        complete = [c.sequence for c in plan.chunks if c.end == c.sequence.length]
        for sequence in [*plan.decodes, *complete]:
            tokens += 1
            sequence.append(1)
            if sequence.position == 1:
                firsts.append(now - arrivals.pop(sequence))
            if sequence.position >= sequence.max_tokens:
                scheduler.remove(sequence)
                add(lengths.randint(128, 384))
    return Outcome(tokens / (now - began), fmean(firsts))


def best_fixed_budget(gpu: Gpu, prompt: int) -> Outcome:
    """Return the outcome of the fixed budget with the highest throughput."""
    outcomes = [serve(gpu, prompt=prompt, budget=budget) for budget in BUDGETS]
    return max(outcomes, key=lambda each: each.tokens_per_second)


@pytest.mark.parametrize("shape", SHAPES)
def test_staggered_streams_are_served_as_fast_as_with_the_best_fixed_budget(shape: str) -> None:
    best, adaptive = best_fixed_budget(SHAPES[shape], 256), serve(SHAPES[shape])
    assert adaptive.tokens_per_second >= 0.95 * best.tokens_per_second
    assert adaptive.first_token_seconds <= 1.25 * best.first_token_seconds


def test_long_prompts_do_not_pay_for_many_launches() -> None:
    """A chunk that fills one tile takes as long as one of eight tiles, if launches take longer."""
    gpu = SHAPES["1B"]
    best, adaptive = best_fixed_budget(gpu, 2048), serve(gpu, prompt=2048)
    assert adaptive.tokens_per_second >= 0.9 * best.tokens_per_second
