"""A step that raises fails only the requests that raise again on their own."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.engine.checked_request import MirostatSettings, SamplingSettings
from services.engine.execution.batch_builder import DeviceTokens
from services.engine.execution.model_runner import ModelRunner
from services.engine.loop.request_table import LoopLimits, RequestTable
from services.engine.messages import AddRequest, Mask, Output, Refused, SetMasks
from services.engine.model.model import Model
from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, TokenSequence
from services.engine.scheduling.step_plan import SchedulerLimits, StepPlan
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine.tiny import (
    BLOCK,
    SAME_EXAMPLES,
    VOCABULARY,
    make_loop,
    make_request,
    run,
    tokens_of,
)

POISON = 7
"""Id that makes every step raise that computes a prompt with it"""
PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=24)
MIROSTAT = SamplingSettings(1.0, 1.0, -1, 0.0, 1, mirostat=MirostatSettings(4.0, 0.1))


class FaultyRunner(ModelRunner):
    """Raises in steps with a poisoned sequence, and once after `raises_once` is set."""

    error: Exception = RuntimeError("The tensor has a bad shape.")
    raises_once = False

    def forward(
        self, plan: StepPlan, drawn: DeviceTokens | None = None, *, taps: bool = True
    ) -> Tensor:
        sequences = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]
        if any(POISON in sequence.tokens[: sequence.prompt_length] for sequence in sequences):
            raise self.error
        hidden = super().forward(plan, drawn, taps=taps)
        if self.raises_once:
            self.raises_once = False
            raise self.error  # keys and values are written, but no token is drawn
        return hidden


def refusals(outputs: Sequence[Output]) -> dict[int, str]:
    return {each.handle: each.reason for each in outputs if isinstance(each, Refused)}


@pytest.mark.parametrize("overlaps", [False, True])
@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    step_tokens=st.integers(5, 64),
    place=st.integers(0, 6),
)
@settings(SAME_EXAMPLES, max_examples=10, deadline=None)
def test_step_that_raises_fails_one_request_and_the_others_keep_their_output(
    decoder: Model, overlaps: bool, prompts: list[list[int]], step_tokens: int, place: int
) -> None:
    """The poisoned prompt shares a prefix: the blocks of its failed step must not be reused."""
    good = [
        make_request(i, [prompt], max_tokens=6, temperature=i % 2, n=1 + i % 2)
        for i, prompt in enumerate(prompts)
    ]
    poisoned = make_request(99, [[*prompts[0], POISON, 1, 2, 3, 1, 2]], max_tokens=6)
    requests: list[AddRequest] = [*good[:place], poisoned, *good[place:]]
    undisturbed = tokens_of(run(make_loop(decoder, step_tokens=step_tokens), good))
    loop = make_loop(decoder, step_tokens=step_tokens, overlaps=overlaps, runner=FaultyRunner)
    outputs = run(loop, requests)
    loop.check()
    assert refusals(outputs) == {99: "STEP_FAILED"}
    assert tokens_of([o for o in outputs if getattr(o, "handle", 99) != 99]) == undisturbed
    later = [make_request(100 + i, [prompt], max_tokens=6) for i, prompt in enumerate(prompts)]
    assert tokens_of(run(loop, later)) == tokens_of(run(make_loop(decoder), later))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("at", [0, 2, 5])
def test_step_that_raises_once_changes_no_output(decoder: Model, overlaps: bool, at: int) -> None:
    requests = [
        make_request(1, [[1, 2, 3]], max_tokens=8),
        make_request(2, [[3, 2, 1, 3]], max_tokens=8, n=2, temperature=1.0),
        make_request(3, [[2, 2]], max_tokens=8, sampling=MIROSTAT),
        make_request(4, [[1, 3, 1, 3, 1]], max_tokens=8, logprobs=2, prompt_logprobs=1),
    ]
    undisturbed = tokens_of(run(make_loop(decoder, step_tokens=4), requests))
    loop = make_loop(decoder, step_tokens=4, overlaps=overlaps, runner=FaultyRunner)
    runner = loop._runner
    assert isinstance(runner, FaultyRunner)
    outputs: list[Output] = []
    loop.apply(requests)
    for step in range(200):
        runner.raises_once = step == at
        outputs += loop.step(list).outputs
        loop.check()
        if loop.is_idle:
            break
    assert refusals(outputs) == {}
    assert tokens_of(outputs) == undisturbed


@pytest.mark.parametrize("overlaps", [False, True])
def test_draw_that_raises_fails_only_its_request(decoder: Model, overlaps: bool) -> None:
    """The grammar service sends one of them a mask for a larger vocabulary."""
    loop = make_loop(decoder, overlaps=overlaps)
    requests = [make_request(i, [[1, 2]], max_tokens=1, constrained=True) for i in range(3)]
    loop.apply(requests)
    outputs = [*loop.step(list).outputs, *loop.step(list).outputs]  # their logits are held
    sizes = [VOCABULARY // 8, VOCABULARY, VOCABULARY // 8]
    masks = [Mask(i, 0, 0, (), b"\xff" * size, False) for i, size in enumerate(sizes)]
    outputs += run(loop, [SetMasks(masks)])
    assert refusals(outputs) == {1: "STEP_FAILED"}
    assert sorted(tokens_of(outputs)) == [(0, 0), (2, 0)]


def test_out_of_memory_has_its_own_reason(decoder: Model) -> None:
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    ):
        loop = make_loop(decoder, runner=FaultyRunner)
        loop._runner.error = error  # type: ignore[attr-defined]
        assert refusals(run(loop, [make_request(1, [[POISON]])])) == {1: "OUT_OF_MEMORY"}
        assert tokens_of(run(loop, [make_request(2, [[1]], max_tokens=2)]))


def test_command_that_raises_fails_only_its_request(decoder: Model) -> None:
    loop = make_loop(decoder)
    bad = make_request(1, [[1, 2]])
    object.__setattr__(bad.checked, "prompts", [["no id"]])
    outputs = run(loop, [bad, make_request(2, [[1, 2]], max_tokens=3)])
    loop.check()
    assert refusals(outputs) == {1: "STEP_FAILED"}
    assert len(tokens_of(outputs)[2, 0]) == 3


def test_choices_of_a_prompt_share_its_ids_and_block_hashes() -> None:
    """128 copies and hashes of a prompt of 128,000 tokens would stall all streams for seconds."""
    limits = SchedulerLimits(64, 64, 2.0, 32)
    scheduler = Scheduler(limits, CachePools(CacheLimits(BLOCK, (GroupLimits(64),))))
    requests = RequestTable(scheduler, LoopLimits(frozenset(), 64), lambda: 0.0)
    requests.carry_out(make_request(1, [list(range(1, 12))], n=3))
    first, *others = scheduler.waiting
    for other in others:
        assert np.shares_memory(first.tokens, other.tokens)
        assert first.block_hash(1) is other.block_hash(1)
        assert first.reusable_hashes()[0] is other.reusable_hashes()[0]


def test_block_hashes_depend_only_on_tokens() -> None:
    """The length of the prompt does not matter, so that a resumed sequence finds its blocks."""
    ids = list(range(1, 14))
    names = []
    for length in range(1, 14):
        request = Request(make_request(1, [ids[:length]], salt=b"salt"))
        prompt = Prompt(ids[:length], b"salt", BLOCK)
        sequence = TokenSequence(request, 0, prompt, None, 20)
        for token in ids[length:]:
            sequence.append(token)
        names.append([sequence.block_hash(i) for i in range(len(ids) // BLOCK)])
        assert sequence.tokens.tolist() == ids
        assert sequence.reusable_hashes() == names[0]
    assert all(each == names[0] for each in names)
