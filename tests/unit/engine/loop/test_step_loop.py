"""Continuous batching without an effect on tokens, and the ends of sequences and requests."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.checked_request import Resume
from services.engine.messages import (
    CancelRequest,
    FinishCause,
    Finished,
    FlushCache,
    GrantCredit,
    Mask,
    Output,
    RequestDone,
    SetMasks,
    Token,
)
from services.engine.model.model import Model
from tests.unit.engine.loop.outputs import greedy_tokens
from tests.unit.engine.tiny import (
    EOS,
    SAME_EXAMPLES,
    VOCABULARY,
    make_loop,
    make_request,
    mask_of,
    run,
    tokens_of,
    with_resume,
)

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=40)


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
    decoder: Model,
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
    decoder: Model, overlaps: bool, actions: list[tuple[str, object, object]]
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
    decoder: Model,
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


def test_speculation_takes_fewer_steps_where_output_repeats(decoder: Model) -> None:
    request = make_request(1, [[7, 8, 9] * 8], max_tokens=60)
    steps = []
    for speculate in (False, True):
        loop = make_loop(decoder, speculate=speculate)
        run(loop, [request])
        steps.append(loop.take_output().load.steps)
    plain, speculated = steps
    assert speculated < plain


@pytest.mark.parametrize("overlaps", [False, True])
def test_expected_answer_takes_fewer_steps(decoder: Model, overlaps: bool) -> None:
    plain = make_request(1, [[7, 8, 9, 5]], max_tokens=60, temperature=1.0)
    loop = make_loop(decoder, overlaps=overlaps)
    ids = [output.id for output in run(loop, [plain]) if isinstance(output, Token)]
    steps = loop.take_output().load.steps
    wrong = [*ids[:20], 3, *ids[21:]]
    for prediction, most in ((ids, 8), (wrong, 14), ([3] * 60, steps)):
        checked = replace(plain.checked, prediction=prediction)
        loop = make_loop(decoder, overlaps=overlaps)
        outputs = run(loop, [replace(plain, checked=checked)])
        assert [output.id for output in outputs if isinstance(output, Token)] == ids
        assert loop.take_output().load.steps <= most


def test_preempted_sequence_continues_with_the_same_tokens(decoder: Model) -> None:
    loop = make_loop(decoder, blocks=16, step_tokens=64)
    prompts = [[i, 5, 6, 7] * 3 for i in range(1, 6)]
    requests = [make_request(i, [prompt], max_tokens=30) for i, prompt in enumerate(prompts)]
    outputs = run(loop, requests)
    assert loop.take_output().load.preemptions > 0
    for i, prompt in enumerate(prompts):
        assert_same_up_to_ties(tokens_of(outputs)[i, 0], greedy_tokens(decoder, prompt, 30))
        positions = [o.position for o in outputs if isinstance(o, Token) and o.handle == i]
        assert positions == list(range(30))


def test_prefix_of_simultaneous_requests_is_computed_once(decoder: Model) -> None:
    loop = make_loop(decoder, step_tokens=16)
    shared = [1, 2, 3, 4] * 10
    requests = [make_request(i, [[*shared, i + 5, 7]], max_tokens=2) for i in range(4)]
    done = [o for o in run(loop, requests) if isinstance(o, RequestDone)]
    assert sorted(o.cached_tokens for o in done) == [0, 40, 40, 40]


def test_choices_count_their_prompt_once_and_differ(decoder: Model) -> None:
    outputs = run(make_loop(decoder), [make_request(1, [[1, 2, 3, 4] * 8], n=4, temperature=1.0)])
    tokens = tokens_of(outputs)
    assert len({tuple(ids) for ids in tokens.values()}) == 4
    [done] = [o for o in outputs if isinstance(o, RequestDone)]
    assert (done.prompt_tokens, done.completion_tokens) == (32, 32)


def test_tenants_do_not_share_cached_prefixes(decoder: Model) -> None:
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
    decoder: Model, prompt: list[int], seed: int, cut: int
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


def test_resumed_sequence_ends_at_a_stop_token_it_already_has(decoder: Model) -> None:
    """The replica that drew the token may have been lost before it reported the end."""
    stopped = make_request(
        1, [[1, 2]], stop=frozenset({5}), resume=[Resume(0, [3, 5])], ignore_eos=False
    )
    ended = replace(with_resume(stopped, Resume(0, [3, EOS])), handle=2)
    outputs = run(make_loop(decoder), [stopped, ended])
    causes = [o.cause for o in outputs if isinstance(o, Finished)]
    assert causes == [FinishCause.STOP_TOKEN, FinishCause.EOS]
    assert not tokens_of(outputs)


def test_min_tokens_is_ignored_if_it_would_ban_every_id(decoder: Model) -> None:
    every = frozenset(range(VOCABULARY))
    for temperature in (0.0, 1.0):
        request = make_request(
            1, [[1, 2]], max_tokens=9, min_tokens=5, stop=every, temperature=temperature
        )
        assert len(tokens_of(run(make_loop(decoder), [request]))[1, 0]) == 1


def test_stop_id_ends_a_sequence_and_is_its_last_token(decoder: Model) -> None:
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


def test_no_stop_id_is_drawn_before_min_tokens(decoder: Model) -> None:
    stop = frozenset(range(VOCABULARY // 2))
    request = make_request(
        1, [[1, 2]], max_tokens=20, min_tokens=6, stop=stop, temperature=1.0, ignore_eos=False
    )
    outputs = run(make_loop(decoder), [request])
    tokens = tokens_of(outputs)[1, 0]
    assert len(tokens) > 6
    assert not stop & set(tokens[:6])


def test_late_mask_changes_no_token_and_delays_no_other_sequence(decoder: Model) -> None:
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


def test_complete_grammar_ends_the_sequence(decoder: Model) -> None:
    loop = make_loop(decoder)
    loop.apply([make_request(1, [[1, 2, 3]], max_tokens=9, constrained=True)])
    loop.apply([SetMasks([Mask(1, 0, 0, (), mask_of({3}), False)])])
    outputs = list(loop.step(list).outputs)
    outputs += run(loop, [SetMasks([Mask(1, 0, 1, (), None, True)])])
    [finished] = [o for o in outputs if isinstance(o, Finished)]
    assert (finished.cause, finished.completion_tokens) == (FinishCause.GRAMMAR, 1)
