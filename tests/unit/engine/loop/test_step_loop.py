"""Continuous batching never changes the tokens and scores of a sequence."""

from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.engine.messages import (
    Admitted,
    CancelRequest,
    DrySettings,
    FinishCause,
    Finished,
    FlushCache,
    GrantCredit,
    LogitBias,
    Mask,
    MirostatSettings,
    Output,
    Refused,
    RequestDone,
    Resume,
    SamplingSettings,
    ScoredPrompt,
    SetMasks,
    Token,
)
from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model
from services.engine.scheduling.block_pool import BlockPool
from services.engine.scheduling.scheduler import Scheduler
from services.engine.scheduling.sequence import Request, Sequence
from services.engine.scheduling.step_plan import SchedulerLimits
from services.engine.scheduling.token_ids import Prompt
from tests.unit.engine import checkpoints
from tests.unit.engine.tiny import (
    BLOCK,
    CONTEXT,
    EOS,
    SAME_EXAMPLES,
    VOCABULARY,
    load_tiny,
    make_checkpoint,
    make_loop,
    make_request,
    mask_of,
    run,
    tokens_of,
    with_resume,
    with_sampling,
)

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


def greedy_tokens(decoder: Decoder, prompt: list[int], max_tokens: int) -> list[Token]:
    outputs = run(
        make_loop(decoder), [make_request(1, [prompt], max_tokens=max_tokens, logprobs=2)]
    )
    return [output for output in outputs if isinstance(output, Token)]


def assert_same_up_to_ties(tokens: list[int], alone: list[Token]) -> None:
    """Assert equality up to the first position whose two best scores are almost equal."""
    assert len(tokens) == len(alone)
    for token, expected in zip(tokens, alone, strict=True):
        if token != expected.id:
            assert expected.score is not None
            first, second = expected.score.top_logprobs[:2]
            assert first - second < 1e-4
            return


@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=8),
    blocks=st.integers(14, 40),
    step_tokens=st.integers(3, 64),
    ticks=st.lists(st.floats(0, 0.1), min_size=1, max_size=8),
)
@settings(max_examples=25)
def test_batching_chunking_caching_and_preemption_never_change_greedy_output(
    decoder: Decoder,
    prompts: list[list[int]],
    blocks: int,
    step_tokens: int,
    ticks: list[float],
) -> None:
    loop = make_loop(decoder, blocks=blocks, step_tokens=step_tokens, ticks=ticks)
    requests = [make_request(i, [prompt], max_tokens=12) for i, prompt in enumerate(prompts)]
    got = tokens_of(run(loop, requests))
    for i, prompt in enumerate(prompts):
        assert_same_up_to_ties(got[i, 0], greedy_tokens(decoder, prompt, 12))


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PROMPTS, st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(0, 9), st.integers(0, 3)),
        st.tuples(st.just("flush"), st.none(), st.none()),
        st.tuples(st.just("step"), st.none(), st.none()),
    ),
    max_size=30,
)


@pytest.mark.parametrize("overlaps", [False, True])
@given(actions=ACTIONS)
@settings(max_examples=25)
def test_every_request_ends_once_and_no_block_is_leaked(
    decoder: Decoder, overlaps: bool, actions: list[tuple[str, object, object]]
) -> None:
    loop = make_loop(decoder, blocks=16, step_tokens=16, overlaps=overlaps)
    choices: list[int] = []
    outputs: list[Output] = []
    for action, first, second in actions:
        if action == "add":
            assert isinstance(first, list)
            assert isinstance(second, int)
            loop.apply([make_request(len(choices), [first], n=second, max_tokens=6)])
            choices.append(second)
        elif action == "cancel":
            assert isinstance(first, int)
            assert isinstance(second, int)
            if first < len(choices):
                sequences = (second,) if second < choices[first] else ()
                loop.apply([CancelRequest(first, sequences)])
        elif action == "flush":
            loop.apply([FlushCache()])
        else:
            outputs += loop.step(list).outputs
        loop.check()
    outputs += run(loop, [])
    ended = [o.handle for o in outputs if isinstance(o, RequestDone)]
    assert sorted(ended) == list(range(len(choices)))
    finished = [(o.handle, o.sequence) for o in outputs if isinstance(o, Finished)]
    assert sorted(finished) == [(h, i) for h, n in enumerate(choices) for i in range(n)]
    load = loop.take_output().load
    assert load.free_blocks == load.total_blocks


@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    blocks=st.integers(18, 60),
    temperature=st.sampled_from([0.0, 0.05, 0.3]),
    credit=st.sampled_from([None, 1, 5]),
)
@settings(SAME_EXAMPLES, max_examples=25)
def test_speculation_never_changes_output(
    decoder: Decoder,
    prompts: list[list[int]],
    blocks: int,
    temperature: float,
    credit: int | None,
) -> None:
    """Greedy or seeded, together with preemption, caching and credit."""
    requests = [
        make_request(i, [prompt], max_tokens=30, temperature=temperature, credit=credit, logprobs=2)
        for i, prompt in enumerate(prompts)
    ]
    more = [GrantCredit(i, 100) for i in range(len(prompts))]
    plain = run(make_loop(decoder, blocks=blocks), [*requests, *more])
    speculated = run(make_loop(decoder, blocks=blocks, speculate=True), [*requests, *more])
    for i in range(len(prompts)):
        tokens = [o for o in speculated if isinstance(o, Token) and o.handle == i]
        assert [t.position for t in tokens] == list(range(30))
        alone = [o for o in plain if isinstance(o, Token) and o.handle == i]
        if temperature:
            assert [t.id for t in tokens] == [t.id for t in alone]
        else:
            assert_same_up_to_ties([t.id for t in tokens], alone)


def test_speculation_takes_fewer_steps_where_output_repeats(decoder: Decoder) -> None:
    request = make_request(1, [[7, 8, 9] * 8], max_tokens=60)
    steps = []
    for speculate in (False, True):
        loop = make_loop(decoder, speculate=speculate)
        run(loop, [request])
        steps.append(loop.take_output().load.steps)
    plain, speculated = steps
    assert speculated < plain


def test_preempted_sequence_continues_with_the_same_tokens(decoder: Decoder) -> None:
    loop = make_loop(decoder, blocks=16, step_tokens=64)
    prompts = [[i, 5, 6, 7] * 3 for i in range(1, 6)]
    requests = [make_request(i, [prompt], max_tokens=30) for i, prompt in enumerate(prompts)]
    outputs = run(loop, requests)
    assert loop.take_output().load.preemptions > 0
    for i, prompt in enumerate(prompts):
        assert_same_up_to_ties(tokens_of(outputs)[i, 0], greedy_tokens(decoder, prompt, 30))
        positions = [o.position for o in outputs if isinstance(o, Token) and o.handle == i]
        assert positions == list(range(30))


def test_prefix_of_simultaneous_requests_is_computed_once(decoder: Decoder) -> None:
    loop = make_loop(decoder, step_tokens=16)
    shared = [1, 2, 3, 4] * 10
    requests = [make_request(i, [[*shared, i + 5, 7]], max_tokens=2) for i in range(4)]
    done = [o for o in run(loop, requests) if isinstance(o, RequestDone)]
    assert sorted(o.cached_tokens for o in done) == [0, 40, 40, 40]


def test_choices_count_their_prompt_once_and_differ(decoder: Decoder) -> None:
    outputs = run(make_loop(decoder), [make_request(1, [[1, 2, 3, 4] * 8], n=4, temperature=1.0)])
    tokens = tokens_of(outputs)
    assert len({tuple(ids) for ids in tokens.values()}) == 4
    [done] = [o for o in outputs if isinstance(o, RequestDone)]
    assert (done.prompt_tokens, done.completion_tokens) == (32, 32)


def test_tenants_do_not_share_cached_prefixes(decoder: Decoder) -> None:
    loop = make_loop(decoder)
    prompt = [1, 2, 3, 4] * 8
    run(loop, [make_request(1, [prompt], salt=b"a")])
    mine, theirs = (
        next(o for o in run(loop, [request]) if isinstance(o, RequestDone)).cached_tokens
        for request in (
            make_request(2, [prompt], salt=b"a"),
            make_request(3, [prompt], salt=b"b"),
        )
    )
    assert (mine, theirs) == (28, 0)


@given(prompt=PROMPTS, seed=st.integers(0, 99), cut=st.integers(0, 9))
@settings(SAME_EXAMPLES, max_examples=25)
def test_resumed_sequence_draws_the_same_rest(
    decoder: Decoder, prompt: list[int], seed: int, cut: int
) -> None:
    whole = make_request(1, [prompt], n=2, max_tokens=10, temperature=1.0, seed=seed)
    first = tokens_of(run(make_loop(decoder), [whole]))
    rest = make_request(
        2,
        [prompt],
        n=2,
        max_tokens=10,
        temperature=1.0,
        seed=seed,
        resume=[Resume(i, first[1, i][:cut]) for i in range(2)],
    )
    outputs = run(make_loop(decoder), [rest])
    for i in range(2):
        assert tokens_of(outputs)[2, i] == first[1, i][cut:]
        finished = next(o for o in outputs if isinstance(o, Finished) and o.sequence == i)
        assert finished.completion_tokens == 10


FREE = SamplingSettings(1.0, 1.0, 0, 0.0, 1)
GREEDY = replace(FREE, temperature=0.0)
BIAS = LogitBias(array("q", [4, 7, EOS]), array("f", [3.0, 2.0, -100.0]))
DRY = DrySettings(1.5, 1.75, 1, frozenset({9}))
SOME = mask_of({*range(4, 40)})
WORDS = ((5,), (7, 8), (8, 9, 5), *((i, i + 1) for i in range(10, 40, 2)))
FEATURES = {
    "logit_bias": replace(FREE, logit_bias=BIAS),
    "frequency and presence": replace(FREE, frequency_penalty=1.0, presence_penalty=0.5),
    "repetition": replace(FREE, repetition_penalty=1.4),
    "dry": replace(FREE, dry=DRY),
    "mirostat": replace(FREE, mirostat=MirostatSettings(4.0, 0.3)),
    "allowed ids": replace(FREE, allowed=SOME),
    "bad words": replace(FREE, bad_words=WORDS),
    "bad words of one token": replace(FREE, bad_words=((5,), (6,), (9,))),
    "greedy with bad words": replace(GREEDY, bad_words=WORDS, allowed=SOME),
    "greedy": replace(GREEDY, repetition_penalty=1.4, dry=DRY, frequency_penalty=0.7),
    "greedy with a bias": replace(GREEDY, logit_bias=BIAS),
    "all": replace(
        FREE,
        logit_bias=BIAS,
        frequency_penalty=0.5,
        presence_penalty=0.5,
        repetition_penalty=1.2,
        dry=DRY,
        mirostat=MirostatSettings(8.0, 0.2),
        allowed=SOME,
        bad_words=WORDS,
    ),
}
REPEATING = [7, 8, 9, 5, 7, 8, 9, 5, 7, 8]


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("speculate", [False, True])
def test_sampling_does_not_depend_on_neighbours_preemption_and_speculation(
    decoder: Decoder, feature: str, speculate: bool
) -> None:
    sampling = FEATURES[feature]
    request = make_request(1, [REPEATING], n=2, max_tokens=30, sampling=sampling)
    alone = tokens_of(run(make_loop(decoder), [request]))
    others = [
        make_request(handle, [[handle, 5, 6, 7] * 3], max_tokens=30, sampling=other)
        for handle, other in enumerate((FREE, GREEDY, *FEATURES.values()), start=2)
    ]
    loop = make_loop(decoder, blocks=24, step_tokens=32, speculate=speculate)
    crowded = tokens_of(run(loop, [*others, replace(request, priority=-1)]))
    assert loop.take_output().load.preemptions > 0
    for i in range(2):
        assert crowded[1, i] == alone[1, i]
    plain = with_sampling(request, GREEDY if sampling.temperature == 0 else FREE)
    assert tokens_of(run(make_loop(decoder), [plain])) != alone


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("cut", [1, 5, 19])
def test_sampling_resumes_from_ids_and_mirostat_state(
    decoder: Decoder, feature: str, cut: int
) -> None:
    request = make_request(1, [REPEATING], n=2, max_tokens=20, sampling=FEATURES[feature])
    outputs = run(make_loop(decoder), [request])
    whole = {i: [o for o in outputs if isinstance(o, Token) and o.sequence == i] for i in range(2)}
    assert all((t.mirostat_mu is None) == (FEATURES[feature].mirostat is None) for t in whole[0])
    resume = [
        Resume(i, [t.id for t in tokens[:cut]], tokens[cut - 1].mirostat_mu)
        for i, tokens in whole.items()
    ]
    outputs = run(make_loop(decoder), [with_resume(request, *resume)])
    rest = [o for o in outputs if isinstance(o, Token)]
    for i, tokens in whole.items():
        mine = [t for t in rest if t.sequence == i]
        assert [t.id for t in mine] == [t.id for t in tokens[cut:]]
        assert [t.mirostat_mu for t in mine] == pytest.approx(
            [t.mirostat_mu for t in tokens[cut:]], abs=1e-3
        )


def test_sampling_settings_do_not_change_logprobs(decoder: Decoder) -> None:
    request = make_request(1, [REPEATING], max_tokens=20, sampling=FEATURES["all"], logprobs=0)
    tokens = [o for o in run(make_loop(decoder), [request]) if isinstance(o, Token)]
    whole = [*REPEATING, *(t.id for t in tokens)]
    scored = run(make_loop(decoder), [make_request(2, [whole], max_tokens=0, prompt_logprobs=0)])
    expected = scores_of(scored, 2)[len(REPEATING) - 1 :]
    assert [t.score.logprob for t in tokens if t.score] == pytest.approx(expected, abs=1e-4)


def test_resumed_sequence_ends_at_a_stop_token_it_already_has(decoder: Decoder) -> None:
    """The replica that drew the token may have been lost before it reported the end."""
    stopped = make_request(
        1, [[1, 2]], stop=frozenset({5}), resume=[Resume(0, [3, 5])], ignore_eos=False
    )
    ended = replace(with_resume(stopped, Resume(0, [3, EOS])), handle=2)
    outputs = run(make_loop(decoder), [stopped, ended])
    causes = [o.cause for o in outputs if isinstance(o, Finished)]
    assert causes == [FinishCause.STOP_TOKEN, FinishCause.EOS]
    assert not tokens_of(outputs)


def test_min_tokens_is_ignored_if_it_would_ban_every_id(decoder: Decoder) -> None:
    every = frozenset(range(VOCABULARY))
    for temperature in (0.0, 1.0):
        request = make_request(
            1, [[1, 2]], max_tokens=9, min_tokens=5, stop=every, temperature=temperature
        )
        assert len(tokens_of(run(make_loop(decoder), [request]))[1, 0]) == 1


@given(prompt=st.lists(st.integers(1, 40), min_size=2, max_size=60), step=st.integers(3, 64))
@settings(max_examples=25)
def test_chunks_and_cache_do_not_change_prompt_scores(
    decoder: Decoder, prompt: list[int], step: int
) -> None:
    loop = make_loop(decoder, step_tokens=step)
    run(loop, [make_request(1, [prompt])])  # fills the prefix cache
    outputs = run(loop, [make_request(2, [prompt], n=2, max_tokens=0, prompt_logprobs=3)])
    scored = [o for o in outputs if isinstance(o, ScoredPrompt)]
    positions = [o.position + i for o in scored for i in range(len(o.ids))]
    assert positions == list(range(1, len(prompt)))
    got = [score.logprob for o in scored for score in o.scores]
    whole = run(make_loop(decoder), [make_request(3, [prompt], max_tokens=0, prompt_logprobs=0)])
    expected = [s.logprob for o in whole if isinstance(o, ScoredPrompt) for s in o.scores]
    assert got == pytest.approx(expected, abs=1e-4)
    assert not [o for o in outputs if isinstance(o, Token)]
    causes = [o.cause for o in outputs if isinstance(o, Finished)]
    assert causes == [FinishCause.LENGTH, FinishCause.LENGTH]


def test_generated_and_scored_logprobs_agree(decoder: Decoder) -> None:
    prompt = [3, 1, 4, 1, 5]
    outputs = run(make_loop(decoder), [make_request(1, [prompt], max_tokens=20, logprobs=0)])
    tokens = [o for o in outputs if isinstance(o, Token)]
    again = [*prompt, *(t.id for t in tokens)]
    scored = run(make_loop(decoder), [make_request(2, [again], max_tokens=0, prompt_logprobs=0)])
    expected = [s.logprob for o in scored if isinstance(o, ScoredPrompt) for s in o.scores]
    got = [t.score.logprob for t in tokens if t.score]
    assert got == pytest.approx(expected[len(prompt) - 1 :], abs=1e-4)


def test_stop_id_ends_a_sequence_and_is_its_last_token(decoder: Decoder) -> None:
    free = greedy_tokens(decoder, [1, 2, 3], 10)
    stop = free[4].id
    first = next(i for i, token in enumerate(free) if token.id == stop)
    outputs = run(
        make_loop(decoder), [make_request(1, [[1, 2, 3]], max_tokens=10, stop=frozenset({stop}))]
    )
    [finished] = [o for o in outputs if isinstance(o, Finished)]
    assert (finished.cause, finished.token_id) == (FinishCause.STOP_TOKEN, stop)
    assert finished.completion_tokens == first + 1
    assert tokens_of(outputs)[1, 0][-1] == stop


def test_no_stop_id_is_drawn_before_min_tokens(decoder: Decoder) -> None:
    stop = frozenset(range(VOCABULARY // 2))
    request = make_request(
        1, [[1, 2]], max_tokens=20, min_tokens=6, stop=stop, temperature=1.0, ignore_eos=False
    )
    outputs = run(make_loop(decoder), [request])
    tokens = tokens_of(outputs)[1, 0]
    assert len(tokens) > 6
    assert not stop & set(tokens[:6])


def test_sequence_without_credit_waits(decoder: Decoder) -> None:
    loop = make_loop(decoder)
    loop.apply([make_request(1, [[1, 2, 3]], max_tokens=10, credit=3)])
    tokens = tokens_of([o for _ in range(8) for o in loop.step(list).outputs])
    assert len(tokens[1, 0]) == 3
    assert not loop.progressed
    rest = tokens_of(run(loop, [GrantCredit(1, 100)]))
    assert tokens[1, 0] + rest[1, 0] == [t.id for t in greedy_tokens(decoder, [1, 2, 3], 10)]


def test_prompt_without_credit_is_computed_for_the_prefix_cache(decoder: Decoder) -> None:
    """Otherwise requests that share the prompt would wait until its client grants credit."""
    prompt = [1 + i % 3 for i in range(4 * BLOCK)]
    loop = make_loop(decoder, step_tokens=BLOCK)
    loop.apply([make_request(1, [prompt], max_tokens=10, credit=0)])
    assert tokens_of([o for _ in range(8) for o in loop.step(list).outputs]) == {}
    loop.apply([make_request(2, [prompt], max_tokens=10)])
    outputs = [o for _ in range(20) for o in loop.step(list).outputs]
    [done] = [output for output in outputs if isinstance(output, RequestDone)]
    assert done.cached_tokens == 3 * BLOCK
    assert tokens_of(run(loop, [GrantCredit(1, 100)]))[1, 0] == tokens_of(outputs)[2, 0]


def test_prompt_scores_need_no_credit(decoder: Decoder) -> None:
    prompt = [1 + i % 3 for i in range(40)]
    request = make_request(1, [prompt], max_tokens=0, prompt_logprobs=2, credit=0)
    outputs = run(make_loop(decoder, step_tokens=16), [request])
    assert [token for o in outputs if isinstance(o, ScoredPrompt) for token in o.ids] == prompt[1:]
    assert isinstance(outputs[-1], RequestDone)


def test_scored_forced_tokens_respect_the_limit_of_logit_rows() -> None:
    """A step scores the forced tokens that it computes, each in a row of its own."""
    limits = SchedulerLimits(8, 256, 2.0, BLOCK, 32, max_logit_rows=16)
    scheduler = Scheduler(limits, BlockPool(256))
    command = make_request(1, [[5]], n=8, max_tokens=40, logprobs=0, constrained=True)
    request = Request(command)
    for index in range(8):
        scheduler.add(Sequence(request, index, Prompt([5], b"", BLOCK), None, 40))
    for sequence in scheduler.waiting:
        sequence.mask = Mask(1, sequence.index, 0, [7] * 12, None, False)
    scheduler.plan(0.0)
    for sequence in scheduler.running:
        sequence.append(7)
    plan = scheduler.plan(0.0)
    assert plan.decode_tokens == 16


def test_queue_position_counts_requests_of_no_lower_priority(decoder: Decoder) -> None:
    """It counts neither their choices nor requests of lower priority."""
    loop = make_loop(decoder, running=1)
    loop.apply([make_request(1, [[1]], n=3), make_request(2, [[2]])])
    loop.apply([make_request(3, [[3]], priority=1), make_request(4, [[4]])])
    admitted = [o for o in loop.step(list).outputs if isinstance(o, Admitted)]
    assert [(a.handle, a.queue_position) for a in admitted] == [(1, 0), (2, 1), (3, 0), (4, 3)]


def test_request_larger_than_the_kv_cache_is_refused(decoder: Decoder) -> None:
    loop = make_loop(decoder, blocks=4)
    [refused] = run(loop, [make_request(1, [[1] * 10], max_tokens=20)])
    assert isinstance(refused, Refused)
    assert refused.reason == "KV_CACHE_TOO_SMALL"


def test_full_queue_refuses_with_a_time_to_retry(decoder: Decoder) -> None:
    loop = make_loop(decoder, running=1, waiting=2)
    loop.apply([make_request(i, [[1, 2, i]]) for i in range(4)])
    refused = [o for o in loop.take_output().outputs if isinstance(o, Refused)]
    assert [r.handle for r in refused] == [2, 3]
    assert refused[0].retry_seconds
    assert len([o for o in run(loop, []) if isinstance(o, RequestDone)]) == 2


def test_higher_priority_runs_first(decoder: Decoder) -> None:
    loop = make_loop(decoder, running=1)
    requests = [make_request(i, [[1, 2, i + 1]], priority=i) for i in range(3)]
    done = [o.handle for o in run(loop, requests) if isinstance(o, RequestDone)]
    assert done == [2, 1, 0]


def test_max_tokens_is_lowered_to_the_rest_of_the_context(decoder: Decoder) -> None:
    prompt = [1] * (CONTEXT - 5)
    outputs = run(make_loop(decoder), [make_request(1, [prompt], max_tokens=50)])
    [admitted] = [o for o in outputs if isinstance(o, Admitted)]
    assert list(admitted.max_tokens) == [5]
    assert len(tokens_of(outputs)[1, 0]) == 5


def test_late_mask_changes_no_token_and_delays_no_other_sequence(decoder: Decoder) -> None:
    masks = [mask_of({3, 4, 5}), mask_of({7, 8}), mask_of({9, 10, 11})]

    def constrained(late: int) -> dict[tuple[int, int], list[int]]:
        loop = make_loop(decoder)
        request = make_request(1, [[1, 2, 3]], max_tokens=3, temperature=1.0, constrained=True)
        loop.apply([request, make_request(2, [[5, 6]], max_tokens=40)])
        outputs: list[Output] = []
        for position, mask in enumerate(masks):
            for _ in range(late):
                outputs += loop.step(list).outputs
            assert len(tokens_of(outputs).get((1, 0), [])) == position
            while len(tokens_of(outputs).get((1, 0), [])) == position:
                commands = [SetMasks([Mask(1, 0, position, (), mask, False)])]
                outputs += loop.step(commands.copy).outputs
        assert len(tokens_of(outputs)[2, 0]) >= 3 * late
        return tokens_of([*outputs, *run(loop, [])])

    assert constrained(0) == constrained(5)


def test_complete_grammar_ends_the_sequence(decoder: Decoder) -> None:
    loop = make_loop(decoder)
    loop.apply([make_request(1, [[1, 2, 3]], max_tokens=9, constrained=True)])
    loop.apply([SetMasks([Mask(1, 0, 0, (), mask_of({3}), False)])])
    outputs = list(loop.step(list).outputs)
    outputs += run(loop, [SetMasks([Mask(1, 0, 1, (), None, True)])])
    [finished] = [o for o in outputs if isinstance(o, Finished)]
    assert (finished.cause, finished.completion_tokens) == (FinishCause.GRAMMAR, 1)


def test_bfloat16_neighbours_change_logprobs_by_rounding_only(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    model = load_model(make_checkpoint(tmp_path_factory.mktemp("tiny")), torch.bfloat16)
    prompts = [[i, 2, 3, i + 1] * 4 for i in range(1, 17)]
    together = run(
        make_loop(model),
        [make_request(i, [p], max_tokens=0, prompt_logprobs=0) for i, p in enumerate(prompts)],
    )
    for i, prompt in enumerate(prompts):
        alone = run(make_loop(model), [make_request(i, [prompt], max_tokens=0, prompt_logprobs=0)])
        assert scores_of(together, i) == pytest.approx(scores_of(alone, i), abs=0.05)


@pytest.mark.parametrize("kind", ["speculate", "overlaps", None])
def test_logprobs_do_not_change_greedy_tokens(
    tmp_path_factory: pytest.TempPathFactory, kind: str | None
) -> None:
    """Without logprobs, tiled kernels search the best token without storing the logits."""
    path = tmp_path_factory.mktemp("wide")
    checkpoints.make_checkpoint(path, checkpoints.CONFIGS["llama, wide heads"])
    model = load_model(path, torch.bfloat16)
    prompts = [[i, 2, 3, i + 1] * i for i in range(1, 9)]

    def generated(logprobs: int | None) -> dict[tuple[int, int], list[int]]:
        requests = [
            make_request(i, [p], max_tokens=5 * i, logprobs=logprobs)
            for i, p in enumerate(prompts, start=1)
        ]
        loop = make_loop(
            model,
            blocks=16,
            step_tokens=24,
            block=32,
            speculate=kind == "speculate",
            overlaps=kind == "overlaps",
        )
        return tokens_of(run(loop, requests))

    tokens = generated(None)
    assert tokens == generated(0)
    assert [len(tokens[i, 0]) for i in range(1, 9)] == [5 * i for i in range(1, 9)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("logprobs", [None, 2])
@pytest.mark.parametrize("constrained", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingSettings(0.0, 1.0, 0, 0.0, 1),
        SamplingSettings(1.0, 1.0, 0, 0.0, 1),
        SamplingSettings(1.0, 0.9, 0, 0.0, 1),
        SamplingSettings(1.0, 1.0, 0, 0.0, 1, mirostat=MirostatSettings(2.0, 0.1)),
    ],
    ids=["greedy", "drawn", "restricted", "mirostat"],
)
def test_nan_weights_fail_a_generating_request(
    tmp_path: Path,
    dtype: torch.dtype,
    logprobs: int | None,
    constrained: bool,
    sampling: SamplingSettings,
) -> None:
    """A token drawn from NaN would look like an answer."""
    loop = make_loop(load_broken(tmp_path, dtype), block=32)
    request = make_request(
        1, [[3, 4]], n=2, sampling=sampling, logprobs=logprobs, constrained=constrained
    )
    mask = Mask(1, 0, 0, (), b"\xfe" * 13, False)  # allows some tokens, but not the first
    masks = SetMasks([mask, replace(mask, sequence=1)] if constrained else [])
    outputs = run(loop, [request, masks])
    assert tokens_of(outputs) == {}
    assert_failed(outputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_tokens", [0, 8])
@pytest.mark.parametrize("step_tokens", [8, 256])
def test_nan_weights_fail_a_scoring_request(
    tmp_path: Path, dtype: torch.dtype, max_tokens: int, step_tokens: int
) -> None:
    """An evaluation harness would take NaN for a score."""
    loop = make_loop(load_broken(tmp_path, dtype), block=32, step_tokens=step_tokens)
    prompts = [[3, 4, 5], list(range(20, 60)), [3, 4, 6]]
    outputs = run(loop, [make_request(1, prompts, max_tokens=max_tokens, prompt_logprobs=1)])
    assert scores_of(outputs, 1) == []
    assert_failed(outputs)


def load_broken(directory: Path, dtype: torch.dtype) -> Decoder:
    """Return a model with one weight of NaN."""
    checkpoints.make_checkpoint(directory, checkpoints.CONFIGS["llama, wide heads"])
    weights = load_file(directory / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"][5, 7] = torch.nan
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return load_model(directory, dtype)


def assert_failed(outputs: list[Output]) -> None:
    """Assert that the request failed once, with its last output."""
    [refused] = [output for output in outputs if isinstance(output, Refused)]
    assert (refused.code, refused.reason) == ("INTERNAL", "NOT_FINITE")
    assert outputs[-1] is refused


def scores_of(outputs: list[Output], handle: int) -> list[float]:
    """Return the logprobs of a request's prompt tokens."""
    scored = [o for o in outputs if isinstance(o, ScoredPrompt) and o.handle == handle]
    return [score.logprob for o in scored for score in o.scores]
