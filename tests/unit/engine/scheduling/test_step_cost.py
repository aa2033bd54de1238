"""Prompts slow running streams down by no more than the factor, and no prompt starves."""

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, TokenSequence
from services.engine.scheduling.step_plan import SchedulerLimits, StepPlan
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine.tiny import make_request

FACTOR = 2.0
ROWS = 32


class Machine:
    """A scheduler whose steps take `seconds(decodes, prompt tokens)` on a fake clock."""

    def __init__(
        self,
        seconds: Callable[[int, int], float],
        rows_at_once: int = ROWS,
        prompts_have_fixed_cost: bool = False,
    ) -> None:
        limits = SchedulerLimits(
            256,
            2048,
            FACTOR,
            rows_at_once=rows_at_once,
            prompts_have_fixed_cost=prompts_have_fixed_cost,
        )
        self.scheduler = Scheduler(limits, CachePools(CacheLimits(32, (GroupLimits(10_000),))))
        self.seconds = seconds
        self.handles = 0
        self.now = 0.0

    def add(self, prompt: int, output: int) -> TokenSequence:
        self.handles += 1
        ids = [self.handles] * prompt
        request = Request(make_request(self.handles, [ids], max_tokens=output))
        sequence = TokenSequence(request, 0, Prompt(ids, b"", 32), None, output)
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> tuple[StepPlan, float]:
        """Run one step, and append a token to every sequence that is fully computed."""
        plan = self.scheduler.plan(self.now)
        took = self.seconds(plan.decode_tokens, plan.prompt_tokens)
        self.now += took
        self.scheduler.learn(plan, took)
        ready = [*plan.decodes, *(c.sequence for c in plan.chunks if c.end == c.sequence.length)]
        for sequence in ready:
            sequence.append(1)
            if sequence.position >= sequence.max_tokens:
                self.scheduler.remove(sequence)
        return plan, took

    def decode(self, streams: int) -> None:
        """Start streams, and let the scheduler learn what their steps cost."""
        for _ in range(streams):
            self.add(40, 10_000)
        for _ in range(10):
            self.step()

    def prefill(self, length: int) -> list[float]:
        """Return the times of the steps that compute a prompt."""
        prompt = self.add(length, 1)
        times = []
        while prompt.position == 0:
            plan, took = self.step()
            if plan.prompt_tokens:
                times.append(took)
        return times


def linear(weights: float, per_stream: float, per_token: float) -> Callable[[int, int], float]:
    return lambda decodes, prompt: weights + per_stream * decodes + per_token * prompt


@pytest.mark.parametrize("rows", [16, ROWS])
@pytest.mark.parametrize("per_token", [1e-5, 1e-4, 3e-4, 1e-3])
@pytest.mark.parametrize("streams", [1, 8, 31, 100])
def test_prompts_slow_streams_down_by_the_factor_at_most(
    streams: int, per_token: float, rows: int
) -> None:
    machine = Machine(linear(0.024, 0.0003, per_token), rows)
    machine.decode(streams)
    alone = machine.seconds(streams, 0)
    for _ in range(10):
        machine.prefill(2048)  # learns what a prompt token costs
    times = machine.prefill(2048)
    # a prompt gets at least one full tile
    least = per_token * 2 * rows
    assert max(times) <= max(FACTOR * alone, alone + least) * 1.05
    assert len(times) == 1 or max(times) >= FACTOR * alone - 1.05 * least


@pytest.mark.parametrize(("rows", "slow"), [(ROWS, 3e-4), (16, 2e-3)])
def test_faster_machine_gets_larger_chunks(rows: int, slow: float) -> None:
    """The scheduler must learn it from small chunks, too."""
    machine = Machine(linear(0.024, 0.0003, slow), rows)
    machine.decode(8)
    steps = len(machine.prefill(2048))
    machine.seconds = linear(0.024, 0.0003, slow / 6)
    machine.prefill(2048)
    assert len(machine.prefill(2048)) < steps / 2


def test_prompt_without_streams_takes_one_step() -> None:
    machine = Machine(linear(0.024, 0.0003, 3e-4))
    machine.decode(8)
    for sequence in list(machine.scheduler.running):
        machine.scheduler.remove(sequence)
    assert len(machine.prefill(2048)) == 1


def test_many_prompts_slow_a_few_streams_down_more() -> None:
    machine = Machine(linear(0.024, 0.0003, 3e-4))
    machine.decode(2)
    machine.prefill(2048)
    for _ in range(16):
        machine.add(128, 8)
    plan, _ = machine.step()
    assert plan.prompt_tokens > 4 * ROWS
    assert len(plan.decodes) == 2


def test_short_prompts_get_more_tokens_per_step_than_long_ones() -> None:
    """Otherwise small batches decode for long, while most prompts wait."""
    tokens = []
    for length in (128, 8192):
        machine = Machine(linear(0.002, 0.00003, 1.4e-5))
        machine.decode(24)
        machine.prefill(2048)
        for _ in range(8):
            machine.add(length, 8)
        plan, took = machine.step()
        assert len(plan.decodes) == 24
        tokens.append(plan.prompt_tokens)
        if length == 8192:
            assert took <= FACTOR * 1.3 * machine.seconds(24, 0)
    assert tokens[0] > 2.5 * tokens[1]


def test_cost_of_growing_contexts_is_learned_during_a_long_prompt() -> None:
    """Otherwise slower decodes count as slower prompts, and throttle them."""
    machine = Machine(linear(0.02, 0.0, 1e-4))
    machine.decode(8)
    machine.add(250_000, 1)
    for step in range(500):
        machine.seconds = linear(0.02 * 1.002**step, 0.0, 1e-4)
        plan, took = machine.step()
    assert plan.prompt_tokens == 0 or took > 0.8 * FACTOR * machine.seconds(8, 0)


def test_fixed_cost_of_prompts_is_not_charged_to_their_tokens() -> None:
    """Otherwise a prompt takes many steps, and each of them pays the fixed cost."""

    def seconds(decodes: int, prompt: int) -> float:
        return 0.02 + 1e-5 * prompt + (0.01 if prompt else 0.0)

    steps = []
    for has_fixed_cost in (False, True):
        machine = Machine(seconds, prompts_have_fixed_cost=has_fixed_cost)
        machine.decode(8)
        for length in (64, 500, 2048) * 4:
            times = machine.prefill(length)
        steps.append(len(times))
        assert max(times) <= FACTOR * seconds(8, 0) * 1.05
    assert steps[1] < steps[0]


@given(
    steps=st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 4096), st.floats(0, 10)), max_size=100
    ),
    streams=st.integers(1, 100),
    has_fixed_cost=st.booleans(),
)
def test_prompts_advance_beside_streams_whatever_was_measured(
    steps: Sequence[tuple[int, int, float]], streams: int, has_fixed_cost: bool
) -> None:
    machine = Machine(linear(0.024, 0.0003, 3e-4), prompts_have_fixed_cost=has_fixed_cost)
    machine.decode(streams)
    for decodes, prompt, seconds in steps:
        machine.scheduler.learn(StepPlan([], [], decodes, prompt), seconds)
    machine.add(2048, 1)
    tokens = [machine.step()[0].prompt_tokens for _ in range(2)]
    assert max(tokens) >= ROWS
