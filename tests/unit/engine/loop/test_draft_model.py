"""Draft model: the output stays the same, and drafts that save nothing take next to no time."""

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.execution import draft_model
from services.engine.execution.draft_model import DraftModel
from services.engine.messages import GrantCredit, RequestDone, Token
from services.engine.model.model import Model
from services.engine.scheduling.draft_plan import DraftPart, DraftResult, PassTime
from tests.unit.engine.loop.checked_graphs import CheckedGraphs
from tests.unit.engine.loop.outputs import greedy_tokens
from tests.unit.engine.loop.test_step_loop import assert_same_up_to_ties
from tests.unit.engine.tiny import (
    SAME_EXAMPLES,
    VOCABULARY,
    load_tiny,
    make_loop,
    make_request,
    run,
    tokens_of,
)

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model whose tokens have nothing in common with those of `decoder`."""
    return load_tiny(tmp_path_factory.mktemp("other"), seed=9)


@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    blocks=st.integers(18, 60),
    temperature=st.sampled_from([0.0, 0.05, 0.3]),
    credit=st.sampled_from([None, 1, 5]),
    same=st.booleans(),
    speculate=st.booleans(),
    padded=st.booleans(),
    overlaps=st.booleans(),
    n=st.integers(1, 3),
)
@settings(SAME_EXAMPLES, max_examples=40)
def test_draft_model_never_changes_output(
    decoder: Model,
    other: Model,
    prompts: list[list[int]],
    blocks: int,
    temperature: float,
    credit: int | None,
    same: bool,
    speculate: bool,
    padded: bool,
    overlaps: bool,
    n: int,
) -> None:
    """Greedy or seeded, together with preemption, shared prefixes, n-grams, choices and credit."""
    requests = [
        make_request(
            i,
            [prompt],
            max_tokens=30,
            temperature=temperature,
            credit=credit,
            logprobs=2,
            n=n,
        )
        for i, prompt in enumerate(prompts)
    ]
    more = [GrantCredit(i, 100) for i in range(len(prompts))]
    plain = run(make_loop(decoder, blocks=blocks), [*requests, *more])
    drafting = make_loop(
        decoder,
        blocks=blocks,
        speculate=speculate,
        padded=padded,
        overlaps=overlaps,
        draft=decoder if same else other,
    )
    drafted = run(drafting, [*requests, *more])
    for place, ids in tokens_of(plain).items():
        if temperature:
            assert tokens_of(drafted)[place] == ids
            continue
        alone = [o for o in plain if isinstance(o, Token) and (o.handle, o.sequence) == place]
        assert_same_up_to_ties(tokens_of(drafted)[place], alone)


@pytest.mark.parametrize("padded", [False, True])
def test_good_drafts_save_most_steps_and_are_reported(
    decoder: Model, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded passes of one token for each sequence run as graphs, at the addresses of a capture."""
    monkeypatch.setattr(draft_model, "StepGraphs", CheckedGraphs)
    CheckedGraphs.runs = 0
    requests = [make_request(i, [[3 + i, 9]], max_tokens=60) for i in range(3)]
    loop = make_loop(decoder, draft=decoder, padded=padded)
    outputs = run(loop, requests)
    load = loop.take_output().load
    [total] = load.drafts
    assert (CheckedGraphs.runs > 0) is padded
    assert load.steps < 40
    assert total.source == "draft_model"
    assert total.accepted == total.drafted > 100
    done = [o for o in outputs if isinstance(o, RequestDone)]
    usage = [count.accepted for each in done for count in each.drafts]
    # the drafts with which the requests end are not part of their usage
    assert total.accepted - 8 * len(requests) <= sum(usage) <= total.accepted
    got = tokens_of(outputs)
    for i in range(3):
        assert_same_up_to_ties(got[i, 0], greedy_tokens(decoder, [3 + i, 9], 60))


class WatchedDraftModel(DraftModel):
    """A draft model that notes what the models of a test compute."""

    parts: ClassVar[list[DraftPart]] = []

    def make(self, parts: Sequence[DraftPart]) -> DraftResult:
        self.parts.extend(parts)
        return super().make(parts)


@pytest.fixture
def parts() -> list[DraftPart]:
    """Parts that watched draft models compute."""
    WatchedDraftModel.parts.clear()
    return WatchedDraftModel.parts


def test_useless_drafts_end_soon_and_are_tried_rarely(
    decoder: Model, other: Model, parts: list[DraftPart]
) -> None:
    loop = make_loop(decoder, draft=other, draft_model=WatchedDraftModel)
    for handle in range(8):
        run(loop, [make_request(handle, [[5 + handle, 9]], max_tokens=90, temperature=4.0)])
    [total] = loop.take_output().load.drafts
    assert total.accepted < total.drafted / 4
    assert 0 < len(parts) < 720 / 20


def test_drafts_that_take_longer_than_a_step_are_not_made_again(
    decoder: Model, parts: list[DraftPart]
) -> None:
    class SlowDraftModel(WatchedDraftModel):
        def make(self, parts: Sequence[DraftPart]) -> DraftResult:
            made, passes = super().make(parts)
            return DraftResult(made, [PassTime(tokens, 1.0) for tokens, _ in passes])

    loop = make_loop(decoder, draft=decoder, draft_model=SlowDraftModel)
    run(loop, [make_request(1, [[5, 9]], max_tokens=90)])
    assert 0 < len(parts) < 5


def test_prefix_that_sequences_share_is_computed_once(
    decoder: Model, parts: list[DraftPart]
) -> None:
    loop = make_loop(decoder, draft=decoder, draft_model=WatchedDraftModel)
    prompt = [3, 9, 4, 7, 1, 8] * 8
    run(loop, [make_request(1, [prompt], max_tokens=20)])
    assert parts[0].start == 0
    assert sum(part.count for part in parts) >= len(prompt)
    parts.clear()
    outputs = run(loop, [make_request(2, [[*prompt[:40], 2, 2]], max_tokens=20)])
    assert parts[0].start == 40
    [total] = next(o for o in outputs if isinstance(o, RequestDone)).drafts
    assert total.accepted == total.drafted > 0


def test_long_prompt_is_computed_in_chunks_before_the_first_draft(
    decoder: Model, parts: list[DraftPart]
) -> None:
    loop = make_loop(decoder, draft=decoder, draft_model=WatchedDraftModel)
    run(loop, [make_request(1, [[3, 9, 4, 7] * 18], max_tokens=20)])
    lengths = [part.length for part in parts]
    first = next(i for i, length in enumerate(lengths) if length)
    assert first > 1
    assert all(part.count <= 32 for part in parts)


def test_failure_of_the_draft_model_ends_its_drafts_alone(decoder: Model) -> None:
    class BrokenDraftModel(DraftModel):
        def make(self, parts: Sequence[DraftPart]) -> DraftResult:
            raise RuntimeError("out of memory")

    loop = make_loop(decoder, draft=decoder, draft_model=BrokenDraftModel)
    got = tokens_of(run(loop, [make_request(1, [[3, 9]], max_tokens=30)]))
    assert_same_up_to_ties(got[1, 0], greedy_tokens(decoder, [3, 9], 30))


def test_draft_model_with_fewer_ids_stands_in_for_the_others(
    decoder: Model, tmp_path: Path
) -> None:
    """Vocabularies of one tokenizer are padded to different sizes."""
    small = load_tiny(tmp_path, vocabulary=VOCABULARY - 8)
    prompt = [VOCABULARY - 1, 9, VOCABULARY - 2]
    for target, draft in ((decoder, small), (small, decoder)):
        top = target.spec.vocab_size
        request = make_request(1, [[min(token, top - 1) for token in prompt]], max_tokens=40)
        plain = tokens_of(run(make_loop(target), [request]))
        assert tokens_of(run(make_loop(target, draft=draft), [request])) == plain
