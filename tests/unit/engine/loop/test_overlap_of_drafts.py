"""Steps overlap as without a drafter wherever no draft depends on tokens in flight."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from torch import Tensor

from services.engine.checked_request import SamplingSettings
from services.engine.execution.batch_builder import DeviceTokens
from services.engine.execution.draft_model import DraftModel
from services.engine.execution.head_drafts import HeadDrafts
from services.engine.execution.model_runner import ModelRunner
from services.engine.messages import AddRequest
from services.engine.model.decoder import Decoder
from services.engine.model.eagle_head import EagleHead
from services.engine.model.model import Model
from services.engine.scheduling.draft_plan import DraftPart, DraftResult, PassTime
from services.engine.scheduling.step_plan import StepPlan
from tests.unit.engine.eagle import load_with_head, make_eagle, make_repeater
from tests.unit.engine.loop.outputs import greedy_tokens
from tests.unit.engine.loop.test_step_loop import assert_same_up_to_ties
from tests.unit.engine.tiny import (
    load_tiny,
    make_checkpoint,
    make_loop,
    make_request,
    run,
    tokens_of,
    with_sampling,
)

PENALISED = SamplingSettings(0.8, 1.0, 0, 0.0, 1, frequency_penalty=0.4)


@dataclass(frozen=True)
class SeenStep:
    """A step that the runner computed."""

    decodes: list[int]
    """Handles of the sequences whose newest token is computed"""
    chunks: list[tuple[int, int, int]]
    """Handle, number of tokens and number of draft tokens of each chunk"""
    read_on_device: int
    """Number of newest tokens that the step reads on the device"""


@dataclass
class Steps:
    """Steps of a loop, noted by its runner."""

    seen: list[SeenStep] = field(default_factory=list)

    def runner(self, *arguments: object) -> ModelRunner:
        """Return a runner that notes its steps here."""
        noted = self.seen

        class NotingRunner(ModelRunner):
            def forward(
                self, plan: StepPlan, drawn: DeviceTokens | None = None, *, taps: bool = True
            ) -> Tensor:
                handles = [sequence.request.command.handle for sequence in plan.decodes]
                chunks = [
                    (each.sequence.request.command.handle, each.count, len(each.draft))
                    for each in plan.chunks
                ]
                read = sum(sequence.in_flight for sequence in plan.decodes)
                noted.append(SeenStep(handles, chunks, read))
                return super().forward(plan, drawn, taps=taps)

        return NotingRunner(*arguments)  # type: ignore[arg-type]


class SlowDraftModel(DraftModel):
    """A draft model whose passes take so long that drafts are off after the first."""

    def make(self, parts: Sequence[DraftPart]) -> DraftResult:
        made, passes = super().make(parts)
        return DraftResult(made, [PassTime(tokens, 1e3) for tokens, _ in passes])


class SlowHeadDrafts(SlowDraftModel, HeadDrafts):
    """A head whose passes take so long that drafts are off after the first."""


@pytest.fixture(scope="module")
def repeating(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, EagleHead]:
    """A model that repeats the newest token, and a head that drafts the same token."""
    directory = tmp_path_factory.mktemp("repeating")
    model = make_repeater(directory / "model", make_checkpoint(directory / "random"))
    return load_with_head(model, make_eagle(directory / "head", model, repeats=True))


def mixed_requests(first: int) -> list[AddRequest]:
    """Return requests of several lengths, one of which has penalties."""
    plain = [
        make_request(first + i, [[5 + i, *[9, 4] * i]], max_tokens=9 + 20 * i, arrival=float(i))
        for i in range(4)
    ]
    return [*plain, with_sampling(make_request(first + 4, [[3]], max_tokens=30), PENALISED)]


@pytest.mark.parametrize("kind", ["draft model", "head"])
def test_steps_are_the_same_as_without_a_drafter_while_drafts_are_off(
    repeating: tuple[Decoder, EagleHead], kind: str
) -> None:
    decoder, head = repeating
    plain, drafting = Steps(), Steps()
    without = make_loop(decoder, overlaps=True, runner=plain.runner)
    loop = make_loop(
        decoder,
        overlaps=True,
        runner=drafting.runner,
        draft=head.model if kind == "head" else decoder,
        targets=head.targets if kind == "head" else (),
        draft_model=SlowDraftModel,
        head_drafts=SlowHeadDrafts,
    )
    ends = make_request(1, [[3, head.targets[0]]], max_tokens=40)
    for each in (without, loop):
        run(each, [ends])
    assert any(chunk[2] for step in drafting.seen for chunk in step.chunks)
    plain.seen.clear()
    drafting.seen.clear()
    expected, got = (tokens_of(run(each, mixed_requests(2))) for each in (without, loop))
    assert got == expected
    assert drafting.seen == plain.seen
    assert sum(step.read_on_device for step in plain.seen) > 100


def test_steps_overlap_while_drafts_are_made_for_no_running_sequence(
    repeating: tuple[Decoder, EagleHead],
) -> None:
    """A draw with penalties depends on the token before, so that such a sequence has no drafts."""
    decoder, head = repeating
    steps = Steps()
    loop = make_loop(
        decoder, overlaps=True, runner=steps.runner, draft=head.model, targets=head.targets
    )
    run(loop, [make_request(1, [[3, head.targets[0]]], max_tokens=40)])
    assert steps.seen[-1].chunks[-1][2]
    steps.seen.clear()
    run(loop, [with_sampling(make_request(2, [[3]], max_tokens=30), PENALISED)])
    assert [step.read_on_device for step in steps.seen[1:]] == 29 * [1]


@pytest.mark.parametrize("kind", ["draft model", "head"])
def test_good_drafts_save_as_many_steps_with_overlap(
    repeating: tuple[Decoder, EagleHead], kind: str
) -> None:
    decoder, head = repeating
    loop = make_loop(
        decoder,
        overlaps=True,
        draft=head.model if kind == "head" else decoder,
        targets=head.targets if kind == "head" else (),
    )
    requests = [make_request(i, [[9, head.targets[i]]], max_tokens=60) for i in range(3)]
    outputs = run(loop, requests)
    load = loop.take_output().load
    [total] = load.drafts
    assert load.steps < 40
    assert total.accepted == total.drafted > 100
    for i in range(3):
        assert tokens_of(outputs)[i, 0] == 60 * [head.targets[i]]


def test_useless_drafts_keep_few_steps_from_overlapping(tmp_path: Path) -> None:
    decoder, other = load_tiny(tmp_path / "one"), load_tiny(tmp_path / "other", seed=9)
    steps = Steps()
    loop = make_loop(decoder, overlaps=True, runner=steps.runner, draft=other)
    for handle in range(8):
        run(loop, [make_request(handle, [[5 + handle, 9]], max_tokens=90, temperature=4.0)])
    read = sum(step.read_on_device for step in steps.seen)
    assert read > 0.9 * len(steps.seen)


def test_repetitions_are_looked_up_where_they_can_save_time(decoder: Model) -> None:
    """Steps of random text overlap, except the few before which the text is searched."""
    steps = Steps()
    loop = make_loop(decoder, overlaps=True, runner=steps.runner, speculate=True)
    run(loop, [make_request(1, [[5, 9]], max_tokens=90, temperature=50.0)])
    read = sum(step.read_on_device for step in steps.seen)
    assert 0.7 * len(steps.seen) < read < len(steps.seen) - 1
    steps.seen.clear()
    allowed = make_request(2, [[7, 8, 9] * 4], max_tokens=60)
    plain = greedy_tokens(decoder, [7, 8, 9] * 4, 60)
    assert_same_up_to_ties(tokens_of(run(loop, [allowed]))[2, 0], plain)
