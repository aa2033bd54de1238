"""Drafts of an EAGLE-3 head: the output stays the same, and the head sees what it was made for."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from torch import Tensor

from services.engine.batch.step_batch import StepBatch
from services.engine.execution import draft_model
from services.engine.execution.batch_builder import DeviceTokens
from services.engine.execution.draft_model import Ids
from services.engine.execution.head_drafts import HeadDrafts
from services.engine.execution.model_runner import ModelRunner, StepCapacity
from services.engine.messages import GrantCredit, RequestDone, Token
from services.engine.model.attention import KVCache
from services.engine.model.decoder import Decoder
from services.engine.model.eagle_head import EagleHead
from services.engine.model.model import Model
from services.engine.scheduling.draft_plan import DraftPart, DraftResult
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.step_plan import StepPlan
from tests.unit.engine.eagle import load_with_head, make_eagle, make_repeater
from tests.unit.engine.loop.checked_graphs import CheckedGraphs
from tests.unit.engine.loop.test_step_loop import assert_same_up_to_ties
from tests.unit.engine.tiny import (
    SAME_EXAMPLES,
    make_checkpoint,
    make_loop,
    make_request,
    run,
    tokens_of,
)

PROMPTS = st.lists(st.integers(1, 3), min_size=1, max_size=40)


@pytest.fixture(scope="module")
def useless(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, EagleHead]:
    """A model, and a head with random weights."""
    directory = tmp_path_factory.mktemp("useless")
    model = make_checkpoint(directory / "model")
    return load_with_head(model, make_eagle(directory / "head", model))


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, EagleHead]:
    """A model that repeats the newest token, and a head that drafts that."""
    directory = tmp_path_factory.mktemp("repeating")
    model = make_repeater(directory / "model", make_checkpoint(directory / "random"))
    return load_with_head(model, make_eagle(directory / "head", model, repeats=True))


class WatchedHeadDrafts(HeadDrafts):
    """Head drafts that note what the heads of a test compute."""

    parts: ClassVar[list[DraftPart]] = []

    def make(self, parts: Sequence[DraftPart]) -> DraftResult:
        self.parts.extend(parts)
        return super().make(parts)


class FreeHeadDrafts(HeadDrafts):
    """Head drafts whose passes take no time, so that the head drafts whatever is accepted."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._clock = lambda: 0.0


@pytest.fixture
def parts() -> list[DraftPart]:
    """Parts that watched heads compute."""
    WatchedHeadDrafts.parts.clear()
    return WatchedHeadDrafts.parts


@given(
    prompts=st.lists(PROMPTS, min_size=1, max_size=6),
    blocks=st.integers(18, 60),
    temperature=st.sampled_from([0.0, 0.05, 0.3]),
    credit=st.sampled_from([None, 1, 5]),
    repeats=st.booleans(),
    speculate=st.booleans(),
    padded=st.booleans(),
    overlaps=st.booleans(),
    most_kept=st.sampled_from([8, 4096]),
    n=st.integers(1, 3),
)
@settings(SAME_EXAMPLES, max_examples=60)
def test_head_never_changes_output(
    useless: tuple[Decoder, EagleHead],
    repeating: tuple[Decoder, EagleHead],
    prompts: list[list[int]],
    blocks: int,
    temperature: float,
    credit: int | None,
    repeats: bool,
    speculate: bool,
    padded: bool,
    overlaps: bool,
    most_kept: int,
    n: int,
) -> None:
    """Greedy or seeded, together with preemption, shared prefixes, n-grams, choices and credit."""
    decoder, head = repeating if repeats else useless
    requests = [
        make_request(
            i, [prompt], max_tokens=30, temperature=temperature, credit=credit, logprobs=2, n=n
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
        draft=head.model,
        targets=head.targets,
        most_kept=most_kept,
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
    repeating: tuple[Decoder, EagleHead], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded passes over the head's own states run as graphs, at the addresses of a capture."""
    monkeypatch.setattr(draft_model, "StepGraphs", CheckedGraphs)
    CheckedGraphs.runs = 0
    decoder, head = repeating
    requests = [make_request(i, [[9, head.targets[i]]], max_tokens=60) for i in range(3)]
    loop = make_loop(decoder, draft=head.model, targets=head.targets, padded=padded)
    outputs = run(loop, requests)
    assert (CheckedGraphs.runs > 0) is padded
    load = loop.take_output().load
    [total] = load.drafts
    assert load.steps < 40
    assert total.source == "eagle"
    assert total.accepted == total.drafted > 100
    for i in range(3):
        assert tokens_of(outputs)[i, 0] == 60 * [head.targets[i]]
    done = [o for o in outputs if isinstance(o, RequestDone)]
    assert all(count.source == "eagle" for each in done for count in each.drafts)
    assert len(done) == 3


@pytest.mark.parametrize("pair", ["useless", "repeating"])
def test_first_passes_run_as_graphs(
    pair: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Behind rejected drafts, the head reads the model's hidden states of one token; behind
    accepted ones, and behind steps without drafts, those of several."""
    monkeypatch.setattr(draft_model, "StepGraphs", CheckedGraphs)
    CheckedGraphs.runs = 0
    passes: list[bool] = []
    several: list[Sequence[DraftPart]] = []
    places: set[int] = set()

    class NotingDrafts(FreeHeadDrafts):
        def _draw_behind_chunks(self, ids: Sequence[Ids], parts: Sequence[DraftPart]) -> Tensor:
            several.append(parts)
            places.add(self._states.data_ptr())
            return super()._draw_behind_chunks(ids, parts)

        def _run(self, batch: StepBatch, *, is_first: bool, is_last: bool) -> Tensor:
            passes.append(is_first)
            places.add(self._states.data_ptr())
            return super()._run(batch, is_first=is_first, is_last=is_last)

    decoder, head = request.getfixturevalue(pair)
    requests = [make_request(i, [[5 + i, 9]], max_tokens=60) for i in range(3)]
    plain = tokens_of(run(make_loop(decoder), requests))
    loop = make_loop(
        decoder, draft=head.model, targets=head.targets, padded=True, head_drafts=NotingDrafts
    )
    assert tokens_of(run(loop, requests)) == plain
    assert CheckedGraphs.runs == len(passes) + len(several)
    assert len(places) == 1, "a graph reads the states of its capture"
    assert any(passes)
    assert any(part.start > 1 and part.count > 1 for parts in several for part in parts)


def test_head_of_the_embedded_model_drafts_what_it_would_say(embedded_model: Path) -> None:
    """The head was trained by models/train; one that read other states would draft nothing."""
    decoder, head = load_with_head(embedded_model, embedded_model / "eagle3")
    tokenizer = Tokenizer.from_file(str(embedded_model / "tokenizer.json"))
    code = ("def read_lines(path):\n", "class Stack:\n    def __init__(self):\n", "import os\n")
    prompts = [tokenizer.encode(text).ids for text in code]
    requests = [
        make_request(i, [prompt], max_tokens=100, context=512, logprobs=2)
        for i, prompt in enumerate(prompts)
    ]
    plain = run(make_loop(decoder, blocks=200), requests)
    loop = make_loop(
        decoder,
        blocks=200,
        draft=head.model,
        targets=head.targets,
        head_drafts=FreeHeadDrafts,
    )
    drafted = run(loop, requests)
    [total] = loop.take_output().load.drafts
    assert total.accepted > 0.2 * total.drafted > 0
    for place, ids in tokens_of(drafted).items():
        alone = [o for o in plain if isinstance(o, Token) and (o.handle, o.sequence) == place]
        assert_same_up_to_ties(ids, alone)


def test_useless_drafts_end_soon_and_are_tried_rarely(
    useless: tuple[Decoder, EagleHead], parts: list[DraftPart]
) -> None:
    decoder, head = useless
    loop = make_loop(decoder, draft=head.model, targets=head.targets, head_drafts=WatchedHeadDrafts)
    for handle in range(8):
        run(loop, [make_request(handle, [[5 + handle, 9]], max_tokens=90, temperature=4.0)])
    [total] = loop.take_output().load.drafts
    assert total.accepted < total.drafted / 4
    assert 0 < len(parts) < 720 / 20


def test_states_are_kept_for_trials_alone_while_drafts_save_nothing(
    repeating: tuple[Decoder, EagleHead],
) -> None:
    """And for all sequences again once drafts are accepted. Each copy lengthens a step."""
    kept: list[int] = []

    class CountedHeadDrafts(HeadDrafts):
        def keep(
            self,
            plan: StepPlan,
            tapped: Sequence[Tensor],
            wanted: Collection[TokenSequence] | None = None,
        ) -> Mapping[TokenSequence, int]:
            kept.append(1)
            return super().keep(plan, tapped, wanted)

    decoder, head = repeating
    loop = make_loop(decoder, draft=head.model, targets=head.targets, head_drafts=CountedHeadDrafts)
    for handle in range(4):
        run(loop, [make_request(handle, [[5 + handle, 9]], max_tokens=100, temperature=50.0)])
    [random] = loop.take_output().load.drafts
    assert len(kept) < 400 / 4
    assert random.accepted < random.drafted / 4
    for handle in range(4, 8):
        run(loop, [make_request(handle, [[3, head.targets[0]]], max_tokens=100)])
    [total] = loop.take_output().load.drafts
    assert total.accepted - random.accepted > 100


def test_padded_steps_copy_states_behind_a_step_that_copies_none(
    repeating: tuple[Decoder, EagleHead],
) -> None:
    """Otherwise a head would read those of an earlier step, and draft other tokens."""
    decoder, _ = repeating
    copied: list[Tensor] = []

    class PausingRunner(ModelRunner):
        def forward(
            self, plan: StepPlan, drawn: DeviceTokens | None = None, *, taps: bool = True
        ) -> Tensor:
            hidden = super().forward(plan, drawn, taps=not plan.chunks)
            if plan.decodes:
                copied.append(torch.cat(list(self.tapped(plan)), dim=1))
            return hidden

    def padding_runner(decoder: Model, cache: KVCache, _: StepCapacity | None) -> ModelRunner:
        """Return a runner that pads decodes alone: no size of steps with chunks is so small."""
        return PausingRunner(decoder, cache, StepCapacity(tokens=8, sequences=2, blocks=16))

    for runner in (PausingRunner, padding_runner):
        run(make_loop(decoder, runner=runner), [make_request(1, [[3, 9]], max_tokens=4)])
    assert len(copied) == 6
    assert torch.equal(torch.stack(copied[3:]), torch.stack(copied[:3]))


def test_prefix_that_sequences_share_is_computed_once(
    repeating: tuple[Decoder, EagleHead], parts: list[DraftPart]
) -> None:
    decoder, head = repeating
    loop = make_loop(decoder, draft=head.model, targets=head.targets, head_drafts=WatchedHeadDrafts)
    token = head.targets[0]
    prompt = [3, 9, 4, 7, 1, 8] * 8
    run(loop, [make_request(1, [[*prompt, token]], max_tokens=20)])
    assert parts[0].start == 1
    assert sum(part.count for part in parts) >= len(prompt)
    parts.clear()
    run(loop, [make_request(2, [[*prompt[:40], 2, token]], max_tokens=20)])
    assert (parts[0].start, parts[0].first_block) == (41, 0)


def test_head_goes_on_behind_hidden_states_that_are_gone(
    repeating: tuple[Decoder, EagleHead], parts: list[DraftPart]
) -> None:
    """Its context then begins at a later block, at the positions that the tokens have."""
    decoder, head = repeating
    loop = make_loop(
        decoder,
        draft=head.model,
        targets=head.targets,
        head_drafts=WatchedHeadDrafts,
        most_kept=32,
    )
    token = head.targets[0]
    outputs = run(loop, [make_request(1, [[*[3, 9, 4, 7] * 12, token]], max_tokens=40)])
    assert parts[0].first_block == 5
    assert parts[0].start == 21
    [total] = loop.take_output().load.drafts
    assert total.accepted == total.drafted > 10
    assert tokens_of(outputs)[1, 0] == 40 * [token]


def test_failure_of_the_head_ends_its_drafts_alone(repeating: tuple[Decoder, EagleHead]) -> None:
    class BrokenHeadDrafts(HeadDrafts):
        def keep(
            self,
            plan: StepPlan,
            tapped: Sequence[Tensor],
            wanted: Collection[TokenSequence] | None = None,
        ) -> Mapping[TokenSequence, int]:
            raise RuntimeError("out of memory")

    decoder, head = repeating
    loop = make_loop(decoder, draft=head.model, targets=head.targets, head_drafts=BrokenHeadDrafts)
    token = head.targets[0]
    got = tokens_of(run(loop, [make_request(1, [[3, token]], max_tokens=30)]))
    assert got[1, 0] == 30 * [token]
    assert not loop.take_output().load.drafts
