"""Beam search: transformers' results, whatever else runs, and however little memory there is."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from services.engine.checked_request import BeamSettings, EarlyStopping, SamplingSettings
from services.engine.messages import (
    AddRequest,
    CancelRequest,
    FinishCause,
    Finished,
    GrantCredit,
    Output,
    Refused,
    RequestDone,
    Token,
)
from services.engine.model.model import Model
from tests.unit.engine.loop.outputs import scores_of
from tests.unit.engine.tiny import (
    EOS,
    SAME_EXAMPLES,
    make_checkpoint,
    make_loop,
    make_request,
    mask_of,
    run,
    tokens_of,
)

PROMPT = [1, 2, 3, 1, 2]
STOP = frozenset({7, 9, 13})
STOPPING = {
    EarlyStopping.ESTIMATE: False,
    EarlyStopping.FIRST: True,
    EarlyStopping.NEVER: "never",
}
PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=20)


class Result(NamedTuple):
    """A sequence of a search."""

    tokens: list[int]
    total: float
    """Sum of the logprobs"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    directory = make_checkpoint(tmp_path_factory.mktemp("reference") / "llama")
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model


def search(
    prompts: Sequence[list[int]] = (PROMPT,),
    width: int = 4,
    *,
    handle: int = 1,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.ESTIMATE,
    max_tokens: int = 12,
    min_tokens: int = 0,
    sampling: SamplingSettings | None = None,
    stop: frozenset[int] = STOP,
    logprobs: int | None = 0,
    credit: int | None = None,
) -> AddRequest:
    request = make_request(
        handle,
        prompts,
        n=width,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        sampling=sampling,
        stop=stop,
        ignore_eos=False,
        logprobs=logprobs,
        credit=credit,
    )
    beams = BeamSettings(length_penalty, early_stopping)
    return replace(request, checked=replace(request.checked, beams=beams))


def results_of(outputs: Sequence[Output], handle: int = 1) -> list[Result]:
    """Return the results in the order of their sequences."""
    tokens = tokens_of(outputs)
    logprobs: dict[int, float] = {}
    for output in outputs:
        if isinstance(output, Token) and output.handle == handle and output.score is not None:
            total = logprobs.get(output.sequence, 0.0) + output.score.logprob
            logprobs[output.sequence] = total
    mine = sorted(sequence for owner, sequence in tokens if owner == handle)
    return [Result(tokens[handle, each], logprobs.get(each, 0.0)) for each in mine]


def of_transformers(
    reference: LlamaForCausalLM,
    prompt: list[int] = PROMPT,
    width: int = 4,
    *,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = EarlyStopping.ESTIMATE,
    max_tokens: int = 12,
    min_tokens: int | None = None,
    stop: frozenset[int] = STOP,
    bad_words: list[list[int]] | None = None,
) -> list[Result]:
    found = reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        length_penalty=length_penalty,
        early_stopping=STOPPING[early_stopping],
        eos_token_id=sorted({EOS, *stop}),
        pad_token_id=EOS,
        bad_words_ids=bad_words,
        return_dict_in_generate=True,
        output_scores=True,
    )
    ends = {EOS, *stop}
    results = []
    for row, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        new = row[len(prompt) :]
        ended = next((place for place, token in enumerate(new) if token in ends), len(new) - 1)
        tokens = new[: ended + 1]
        results.append(Result(tokens, score * len(tokens) ** length_penalty))
    return results


def assert_same(found: Sequence[Result], expected: Sequence[Result]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.total == pytest.approx(theirs.total, abs=1e-3)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("early_stopping", EarlyStopping)
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.5])
@pytest.mark.parametrize("width", [2, 5])
def test_results_equal_transformers(
    decoder: Model,
    reference: LlamaForCausalLM,
    overlaps: bool,
    early_stopping: EarlyStopping,
    length_penalty: float,
    width: int,
) -> None:
    for prompt in (PROMPT, [3], [2, 2, 1, 3, 1, 1, 2, 3, 3]):
        request = search(
            [prompt], width, length_penalty=length_penalty, early_stopping=early_stopping
        )
        found = results_of(run(make_loop(decoder, overlaps=overlaps), [request]))
        expected = of_transformers(
            reference, prompt, width, length_penalty=length_penalty, early_stopping=early_stopping
        )
        assert_same(found, expected)


def test_one_beam_is_greedy(decoder: Model) -> None:
    greedy = make_request(2, [PROMPT], max_tokens=12, stop=STOP, ignore_eos=False)
    outputs = run(make_loop(decoder), [search(width=1), greedy])
    tokens = tokens_of(outputs)
    assert tokens[1, 0] == tokens[2, 0]


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_lengths_equal_transformers(
    decoder: Model, reference: LlamaForCausalLM, max_tokens: int
) -> None:
    outputs = run(make_loop(decoder), [search(max_tokens=max_tokens)])
    assert_same(results_of(outputs), of_transformers(reference, max_tokens=max_tokens))


def test_excluded_tokens_equal_transformers(decoder: Model, reference: LlamaForCausalLM) -> None:
    """A bad word, and ends before min_tokens, are never part of a beam."""
    plain = results_of(run(make_loop(decoder), [search()]))
    bad = plain[0].tokens[1]
    sampling = SamplingSettings(0.0, 1.0, 0, 0.0, 1, bad_words=((bad,),))
    found = results_of(run(make_loop(decoder), [search(sampling=sampling, min_tokens=6)]))
    assert_same(found, of_transformers(reference, min_tokens=6, bad_words=[[bad]]))
    assert bad not in found[0].tokens


def test_few_allowed_tokens_give_each_sequence_once_before_they_repeat(decoder: Model) -> None:
    """Two tokens make four sequences of two; no beam that has no continuation is a result."""
    sampling = SamplingSettings(0.0, 1.0, 0, 0.0, 1, allowed=mask_of({20, 21}))
    found = results_of(run(make_loop(decoder), [search(width=6, max_tokens=2, sampling=sampling)]))
    assert {tuple(each.tokens) for each in found} == {(a, b) for a in (20, 21) for b in (20, 21)}
    assert len(found) == 6


@given(
    prompts=st.lists(st.lists(PROMPTS, min_size=1, max_size=2), min_size=1, max_size=4),
    widths=st.lists(st.integers(1, 5), min_size=4, max_size=4),
    blocks=st.integers(40, 80),
    step_tokens=st.integers(3, 64),
    running=st.integers(2, 12),
    overlaps=st.booleans(),
    samples=st.booleans(),
)
@settings(SAME_EXAMPLES, max_examples=25)
def test_neither_neighbours_nor_a_lack_of_memory_or_places_change_results(
    decoder: Model,
    prompts: list[list[list[int]]],
    widths: list[int],
    blocks: int,
    step_tokens: int,
    running: int,
    overlaps: bool,
    samples: bool,
) -> None:
    requests = [
        search(group, width, handle=handle)
        for handle, (group, width) in enumerate(zip(prompts, widths, strict=False))
    ]
    others = [make_request(100, [[1, 2, 3]], n=3, max_tokens=20, temperature=0.7)] * samples
    loop = make_loop(
        decoder, blocks=blocks, step_tokens=step_tokens, running=running, overlaps=overlaps
    )
    outputs = run(loop, [*requests, *others])
    loop.check()
    for handle, (group, width) in enumerate(zip(prompts, widths, strict=False)):
        alone = run(make_loop(decoder), [search(group, width, handle=handle)])
        assert_same(results_of(outputs, handle), results_of(alone, handle))
    load = loop.take_output().load
    assert load.free_blocks == load.total_blocks


def test_beams_share_the_blocks_of_their_prompt(decoder: Model) -> None:
    """Five beams behind a prompt of 15 blocks fit into 30 blocks without preemption."""
    loop = make_loop(decoder, blocks=30)
    results = results_of(run(loop, [search([[1, 2, 3] * 20], 5)]))
    assert len(results) == 5
    assert loop.take_output().load.preemptions == 0


def test_results_come_best_first_as_credit_allows(decoder: Model) -> None:
    whole = results_of(run(make_loop(decoder), [search()]))
    loop = make_loop(decoder)
    loop.apply([search(credit=2)])
    outputs = [output for _ in range(20) for output in loop.step(list).outputs]
    assert [each.tokens for each in results_of(outputs)] == [each.tokens[:2] for each in whole]
    assert not any(isinstance(output, RequestDone) for output in outputs)
    outputs += run(loop, [GrantCredit(1, 100)])
    assert [each.tokens for each in results_of(outputs)] == [each.tokens for each in whole]
    ranks = [each.total / len(each.tokens) for each in whole]
    assert all(better >= worse for better, worse in pairwise(ranks))


def test_reader_that_takes_no_results_is_cut_off(decoder: Model) -> None:
    outputs = run(make_loop(decoder), [search(credit=2)])
    [refusal] = [output for output in outputs if isinstance(output, Refused)]
    assert refusal.reason == "STALLED"


@pytest.mark.parametrize("isolates", [False, True])
def test_failure_of_one_prompt_ends_the_request_alone(decoder: Model, isolates: bool) -> None:
    """With several ranks, an exception of the loop would end the engine."""
    limits = {"allowed": mask_of({20, 21}), "bad_words": ((20, 20), (20, 21))}
    sampling = SamplingSettings(0.0, 1.0, 0, 0.0, 1, **limits)  # type: ignore[arg-type]
    prompts = {}
    for prompt in ([1, 2, 3, 1, 2], [3], [2, 2, 1], [2], [10, 11], [12]):
        first = replace(sampling, bad_words=())
        outputs = run(make_loop(decoder), [search([prompt], 1, max_tokens=1, sampling=first)])
        prompts[tokens_of(outputs)[1, 0][0]] = prompt
    loop = make_loop(decoder, isolates=isolates)
    stuck_first = [prompts[20], prompts[21]]
    other = make_request(2, [[4, 4]], max_tokens=20)
    outputs = run(loop, [search(stuck_first, 1, max_tokens=2, sampling=sampling), other])
    [refusal] = [output for output in outputs if isinstance(output, Refused)]
    assert (refusal.handle, refusal.reason) == (1, "NOTHING_ALLOWED")
    assert len(tokens_of(outputs)[2, 0]) == 20


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("max_tokens", [1, 2])
def test_scores_of_the_prompt_come_before_the_end(
    decoder: Model, overlaps: bool, max_tokens: int
) -> None:
    request = search(max_tokens=max_tokens)
    request = replace(request, checked=replace(request.checked, prompt_logprobs=0))
    outputs = run(make_loop(decoder, overlaps=overlaps), [request])
    assert len(scores_of(outputs, 1)) == len(PROMPT) - 1


@pytest.mark.parametrize(("running", "blocks"), [(4, 256), (64, 32)])
def test_search_does_not_wait_for_the_end_of_other_streams(
    decoder: Model, running: int, blocks: int
) -> None:
    """A search that lacks places or blocks takes turns with its own beams."""
    stream = make_request(2, [[4, 4]], max_tokens=80)
    prompt = [1, 2, 3] * 10 if running > 4 else PROMPT
    loop = make_loop(decoder, running=running, blocks=blocks)
    outputs = run(loop, [stream, search([prompt], 6, max_tokens=4)])
    ends = [output.handle for output in outputs if isinstance(output, RequestDone)]
    assert ends == [1, 2]


def test_searches_under_way_fit_into_the_places(decoder: Model) -> None:
    """Every beam that waits for others holds a row of logits: a second search waits instead."""
    loop = make_loop(decoder, running=6)
    outputs = run(loop, [search(width=4, handle=handle) for handle in range(4)])
    ends = [output.handle for output in outputs if isinstance(output, RequestDone)]
    assert ends == [0, 1, 2, 3]
    assert loop.take_output().load.preemptions == 0


def test_long_results_come_in_parts(decoder: Model) -> None:
    loop = make_loop(decoder, blocks=2_000, running=128)
    loop.apply([search([[1], [2]], 30, max_tokens=90, stop=frozenset(), logprobs=None)])
    sizes = []
    while not loop.is_idle:
        outputs = loop.step(list).outputs
        sizes.append(sum(isinstance(output, Token) for output in outputs))
    assert sum(sizes) > 4_096
    assert max(sizes) == 4_096
    assert loop.take_output().outputs == []


def test_usage_counts_the_tokens_of_the_results(decoder: Model) -> None:
    outputs = run(make_loop(decoder), [search()])
    [done] = [output for output in outputs if isinstance(output, RequestDone)]
    assert done.completion_tokens == sum(len(each.tokens) for each in results_of(outputs))


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancelled_search_frees_everything(decoder: Model, steps: int) -> None:
    loop = make_loop(decoder)
    loop.apply([search()])
    outputs = [output for _ in range(steps) for output in loop.step(list).outputs]
    loop.apply([CancelRequest(1)])
    outputs += run(loop, [])
    ends = [output for output in outputs if isinstance(output, Finished)]
    assert [end.cause for end in ends] == [FinishCause.CANCELLED] * 4
    load = loop.take_output().load
    assert load.free_blocks == load.total_blocks


def test_cancelled_result_leaves_the_others_as_they_are(decoder: Model) -> None:
    whole = results_of(run(make_loop(decoder), [search()]))
    loop = make_loop(decoder)
    loop.apply([search(), CancelRequest(1, (1,))])
    outputs = run(loop, [])
    tokens = tokens_of(outputs)
    assert [tokens[1, index] for index in (0, 2, 3)] == [whole[i].tokens for i in (0, 2, 3)]
    assert (1, 1) not in tokens


def test_causes_name_what_ended_each_result(decoder: Model) -> None:
    outputs = run(make_loop(decoder), [search(early_stopping=EarlyStopping.FIRST)])
    tokens = tokens_of(outputs)
    for end in (output for output in outputs if isinstance(output, Finished)):
        last = tokens[1, end.sequence][-1]
        if last in STOP:
            assert (end.cause, end.token_id) == (FinishCause.STOP_TOKEN, last)
        elif last == EOS:
            assert (end.cause, end.token_id) == (FinishCause.EOS, EOS)
        else:
            assert (end.cause, end.token_id) == (FinishCause.LENGTH, None)
        assert end.completion_tokens == len(tokens[1, end.sequence])
