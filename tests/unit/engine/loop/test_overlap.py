"""Overlapping steps generate the same tokens as consecutive steps."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.engine.checked_request import MirostatSettings, SamplingSettings
from services.engine.loop.step_loop import StepLoop
from services.engine.messages import (
    AddRequest,
    CancelRequest,
    FinishCause,
    Finished,
    GrantCredit,
    Mask,
    Output,
    RequestDone,
    SetMasks,
    Token,
)
from services.engine.model.model import Model
from services.engine.sampling import sampler
from services.engine.scheduling.cache_limits import CacheLimits, GroupLimits
from services.engine.scheduling.cache_pools import CachePools
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, TokenSequence
from services.engine.scheduling.step_plan import SchedulerLimits
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine.tiny import (
    BLOCK,
    EOS,
    SAME_EXAMPLES,
    VOCABULARY,
    make_loop,
    make_request,
    mask_of,
    run,
    tokens_of,
)

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=40)
KINDS: dict[str, SamplingSettings] = {
    "greedy": SamplingSettings(0.0, 1.0, 0, 0.0, 1),
    "plain": SamplingSettings(0.7, 1.0, 0, 0.0, 1),
    "restricted": SamplingSettings(0.7, 0.9, 0, 0.05, 1),
    "top-k": SamplingSettings(1.0, 1.0, 3, 0.0, 1),
    "allowed ids": SamplingSettings(0.7, 0.9, 0, 0.0, 1, allowed=mask_of({*range(0, 48, 2), 17})),
    "suppressed ids": SamplingSettings(0.0, 1.0, 0, 0.0, 1, suppressed=(5,), suppressed_first=(6,)),
    "bad words": SamplingSettings(0.7, 1.0, 0, 0.0, 1, bad_words=((5,), (6,))),
    "longer bad words": SamplingSettings(0.7, 1.0, 0, 0.0, 1, bad_words=((5, 6), (7, 8, 9))),
    "penalised": SamplingSettings(0.7, 1.0, 0, 0.0, 1, repetition_penalty=1.3),
}


@pytest.fixture
def few_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw among so few candidates that many draws must be repeated over all tokens."""
    monkeypatch.setattr(sampler, "_CANDIDATES", 3)


@given(
    prompts=st.lists(
        st.tuples(PROMPTS, st.sampled_from(sorted(KINDS)), st.integers(1, 12), st.integers(1, 3)),
        min_size=1,
        max_size=6,
    ),
    blocks=st.integers(40, 120),
    step_tokens=st.integers(3, 64),
    logprobs=st.sampled_from([None, None, 0]),
    credit=st.sampled_from([None, None, 1, 5]),
)
@settings(
    SAME_EXAMPLES,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@pytest.mark.usefixtures("few_candidates")
def test_overlap_never_changes_output(
    decoder: Model,
    prompts: list[tuple[list[int], str, int, int]],
    blocks: int,
    step_tokens: int,
    logprobs: int | None,
    credit: int | None,
) -> None:
    """Some requests meet a stop token, have penalties and can't run ahead, or share blocks."""
    requests = [
        make_request(
            handle,
            [prompt],
            n=n,
            max_tokens=length,
            sampling=replace(KINDS[kind], seed=handle),
            stop=frozenset({handle, 17, 30}),
            ignore_eos=handle % 2 == 0,
            min_tokens=handle % 3,
            logprobs=logprobs if handle == 0 else None,
            credit=credit,
        )
        for handle, (prompt, kind, length, n) in enumerate(prompts)
    ]
    more = [GrantCredit(handle, 100) for handle in range(len(prompts))]

    def outcome(overlaps: bool) -> tuple[object, object]:
        loop = make_loop(decoder, blocks=blocks, step_tokens=step_tokens, overlaps=overlaps)
        if credit is None:
            outputs = run(loop, requests)
        else:
            outputs = run_with_credit(loop, requests, credit, more)
        ends = {
            (o.handle, o.sequence): (o.cause, o.token_id, o.completion_tokens)
            for o in outputs
            if isinstance(o, Finished)
        }
        positions: dict[tuple[int, int], int] = {}
        for o in outputs:
            if isinstance(o, Token):
                assert o.position == positions.get((o.handle, o.sequence), 0)
                positions[o.handle, o.sequence] = o.position + 1
        return tokens_of(outputs), ends

    assert outcome(True) == outcome(False)


def run_with_credit(
    loop: StepLoop, requests: Sequence[AddRequest], credit: int, more: Sequence[GrantCredit]
) -> list[Output]:
    """Let all requests use up their credit before they get more."""
    loop.apply(requests)
    outputs = list(loop.step(list).outputs)
    while loop.progressed:
        outputs += loop.step(list).outputs
        loop.check()
    assert all(len(tokens) <= credit for tokens in tokens_of(outputs).values())
    return outputs + run(loop, more)


@given(prompts=st.lists(PROMPTS, min_size=2, max_size=8), blocks=st.integers(14, 30))
@settings(SAME_EXAMPLES, max_examples=30)
def test_preemption_never_changes_output(
    decoder: Model, prompts: list[list[int]], blocks: int
) -> None:
    requests = [
        make_request(i, [prompt], max_tokens=14, temperature=0.5, seed=i)
        for i, prompt in enumerate(prompts)
    ]
    plain, overlapped = (
        tokens_of(run(make_loop(decoder, blocks=blocks, overlaps=overlaps), requests))
        for overlaps in (False, True)
    )
    assert plain == overlapped


def test_step_is_launched_before_the_tokens_of_the_previous_one_are_reported(
    decoder: Model,
) -> None:
    loop = make_loop(decoder, overlaps=True)
    loop.apply([make_request(1, [[1, 2, 3]], max_tokens=4)])
    reported = [len(tokens_of(loop.step(list).outputs).get((1, 0), [])) for _ in range(5)]
    assert reported == [0, 1, 1, 1, 1]
    assert (
        loop.take_output().load.steps == 4
    )  # no row is wasted: the loop foresees the end by length
    assert loop.is_idle


def test_unforeseen_end_wastes_one_row(decoder: Model) -> None:
    prompt = [1, 2, 3]
    tokens = tokens_of(run(make_loop(decoder), [make_request(1, [prompt], max_tokens=20)]))[1, 0]
    stop = tokens[4]
    loop = make_loop(decoder, overlaps=True)
    outputs = run(loop, [make_request(1, [prompt], max_tokens=20, stop=frozenset({stop}))])
    [finished] = [o for o in outputs if isinstance(o, Finished)]
    assert (finished.cause, finished.token_id) == (FinishCause.STOP_TOKEN, stop)
    length = tokens.index(stop) + 1
    assert tokens_of(outputs)[1, 0] == tokens[:length]
    assert loop.take_output().load.steps == length + 1
    for was_in_flight in (True, False):
        assert loop.step(list).outputs == []
        assert loop.progressed == was_in_flight


def test_blocks_of_overlapping_steps_are_cached_with_their_contents(decoder: Model) -> None:
    """A continuation from the cache generates the same tokens as one without it."""
    prompt = [1, 2, 3, 4, 5]
    for overlaps in (False, True):
        loop = make_loop(decoder, overlaps=overlaps)
        first = tokens_of(run(loop, [make_request(1, [prompt], max_tokens=20, temperature=0.8)]))
        longer = [*prompt, *first[1, 0], 7]
        again = run(loop, [make_request(2, [longer], max_tokens=10)])
        [done] = [o for o in again if isinstance(o, RequestDone)]
        assert done.cached_tokens == 24  # 24 of the 25 tokens were computed: six whole blocks
        alone = run(make_loop(decoder), [make_request(2, [longer], max_tokens=10)])
        assert tokens_of(again) == tokens_of(alone)


@pytest.mark.usefixtures("few_candidates")
def test_wrong_assumed_token_is_computed_again_and_never_cached(decoder: Model) -> None:
    sampling = SamplingSettings(3.0, 0.95, 0, 0.0, 5)
    request = make_request(1, [[1, 2, 3]], max_tokens=40, sampling=sampling)
    plain, loop = make_loop(decoder), make_loop(decoder, overlaps=True)
    tokens = tokens_of(run(plain, [request]))
    assert tokens_of(run(loop, [request])) == tokens
    assert loop.take_output().load.steps > plain.take_output().load.steps  # some were wrong
    longer = make_request(2, [[1, 2, 3, *tokens[1, 0], 7]], max_tokens=10)
    again = run(loop, [longer])
    assert [o.cached_tokens for o in again if isinstance(o, RequestDone)] == [40]
    assert tokens_of(again) == tokens_of(run(make_loop(decoder), [longer]))


@pytest.mark.usefixtures("few_candidates")
def test_block_with_a_wrong_assumed_token_is_not_cached(decoder: Model) -> None:
    """The request is cancelled before a later step writes the right token."""
    sampling = SamplingSettings(3.0, 0.95, 0, 0.0, 5)
    whole = make_request(1, [[1, 2, 3]], max_tokens=40, sampling=sampling)
    tokens = tokens_of(run(make_loop(decoder), [whole]))[1, 0]
    longer = make_request(2, [[1, 2, 3, *tokens, 7]], max_tokens=4)
    expected = tokens_of(run(make_loop(decoder), [longer]))[2, 0]
    for steps in range(2, 50):
        loop = make_loop(decoder, overlaps=True)
        loop.apply([whole])
        for _ in range(steps):
            loop.step(list)
        assert tokens_of(run(loop, [CancelRequest(1), longer]))[2, 0] == expected


ANY_BUT_EOS = bytes([0b11111110, *[255] * (VOCABULARY // 8 - 1)])


def test_late_masks_change_no_token(decoder: Model) -> None:
    def outcome(overlaps: bool) -> dict[tuple[int, int], list[int]]:
        loop = make_loop(decoder, overlaps=overlaps)
        loop.apply([make_request(1, [[1, 2, 3]], max_tokens=20)])
        outputs = [o for _ in range(3) for o in loop.step(list).outputs]
        loop.apply([make_request(2, [[4, 5]], max_tokens=5, constrained=True)])
        outputs += loop.step(list).outputs
        for position in range(5):
            loop.apply([SetMasks([Mask(2, 0, position, (), ANY_BUT_EOS, False)])])
            outputs += loop.step(list).outputs
            outputs += loop.step(list).outputs
            loop.check()
        return tokens_of([*outputs, *run(loop, [])])

    assert outcome(True) == outcome(False)
    assert EOS not in outcome(True)[2, 0]


NEEDS_THE_HOST = {
    "penalised": make_request(
        1, [[1, 2, 3]], sampling=replace(KINDS["penalised"], frequency_penalty=0.5)
    ),
    "mirostat": make_request(
        1, [[1, 2, 3]], sampling=replace(KINDS["plain"], mirostat=MirostatSettings(3.0, 0.1))
    ),
    "scored": make_request(1, [[1, 2, 3]], logprobs=2, prompt_logprobs=1),
    "longer bad words": make_request(1, [[1, 2, 3]], sampling=KINDS["longer bad words"]),
}


@pytest.mark.parametrize("kind", NEEDS_THE_HOST)
def test_stream_that_needs_the_host_takes_part_in_every_step(decoder: Model, kind: str) -> None:
    """And the step of all streams is launched before the host has the tokens in front."""
    loop = make_loop(decoder, overlaps=True)
    loop.apply([NEEDS_THE_HOST[kind], make_request(2, [[1, 2, 3]])])
    for count in range(10):
        tokens = tokens_of(loop.step(list).outputs)
        assert {key: len(ids) for key, ids in tokens.items()} == (
            {(1, 0): 1, (2, 0): 1} if 0 < count < 9 else {}
        )
    assert loop.is_idle
    assert loop.take_output().load.steps == 8


def test_constrained_stream_takes_part_in_every_step_if_its_masks_are_in_time(
    decoder: Model,
) -> None:
    loop = make_loop(decoder, overlaps=True)
    loop.apply([make_request(1, [[1, 2, 3]], constrained=True), make_request(2, [[1, 2, 3]])])
    outputs: list[Output] = []
    for _ in range(9):
        position = len(tokens_of(outputs).get((1, 0), []))
        loop.apply([SetMasks([Mask(1, 0, position, (), ANY_BUT_EOS, False)])])
        outputs += loop.step(list).outputs
    assert loop.is_idle
    assert loop.take_output().load.steps == 8


def test_stream_without_a_mask_alone_misses_steps(decoder: Model) -> None:
    loop = make_loop(decoder, overlaps=True)
    loop.apply([make_request(1, [[1, 2, 3]], constrained=True), make_request(2, [[1, 2, 3]])])
    outputs = [o for _ in range(9) for o in loop.step(list).outputs]
    assert [len(ids) for ids in tokens_of(outputs).values()] == [8]
    assert loop.take_output().load.steps == 8
    assert not loop.step(list).outputs
    assert not loop.progressed  # the process sleeps until a mask comes
    loop.apply([SetMasks([Mask(1, 0, 0, (), ANY_BUT_EOS, False)])])
    assert len(tokens_of(loop.step(list).outputs)[1, 0]) == 1


def test_next_step_waits_for_masks_only_while_the_device_computes(decoder: Model) -> None:
    loop = make_loop(decoder, overlaps=True, ticks=[0.001])
    loop.apply([make_request(1, [[1, 2, 3]], max_tokens=40)])
    for _ in range(5):
        loop.step(list)
        assert loop.spare_seconds == 0  # no mask is missing
    loop.apply([make_request(2, [[1, 2, 3]], constrained=True)])
    loop.step(list)
    assert loop.spare_seconds > 0
    for _ in range(20):
        seconds = loop.spare_seconds  # each reading of the clock takes a millisecond
    assert seconds == 0
    loop.step(list)
    assert loop.spare_seconds > 0
    loop.apply([SetMasks([Mask(2, 0, 0, (), ANY_BUT_EOS, False)])])
    assert loop.spare_seconds == 0


def test_preempted_sequence_restarts_once_its_token_is_on_the_host() -> None:
    """Until then nobody knows the last token that it must compute."""
    scheduler = Scheduler(
        SchedulerLimits(4, 64, 2.0, 32), CachePools(CacheLimits(BLOCK, (GroupLimits(64),)))
    )
    request = Request(make_request(1, [[1, 2, 3]]))
    sequence = TokenSequence(request, 0, Prompt([1, 2, 3], b"", BLOCK), None, 8)
    scheduler.add(sequence)
    scheduler.plan(0.0)
    sequence.in_flight = 1
    scheduler._preempt(sequence)
    assert scheduler.plan(0.0).is_empty
    sequence.append(5)
    scheduler.settle(sequence)
    [chunk] = scheduler.plan(0.0).chunks
    assert chunk.count == 4


def test_padded_rows_change_no_token(decoder: Model) -> None:
    """GPU graphs need padded rows; this test runs padded steps without graphs."""
    requests = [
        make_request(i, [[i + 1, 2, 3] * 4], max_tokens=6 + i, temperature=0.7, seed=i)
        for i in range(5)
    ]
    for overlaps in (False, True):
        padded = make_loop(decoder, padded=True, overlaps=overlaps)
        assert tokens_of(run(padded, requests)) == tokens_of(run(make_loop(decoder), requests))
