"""An engine that drafts with Gemma 4's assistant gives the same answers."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from services.common.settings import StartupError
from services.engine.engine import Engine
from services.engine.execution import draft_loader, draft_model
from services.engine.execution.assistant_drafts import AssistantDrafts
from services.engine.execution.model_runner import StepCapacity
from services.engine.scheduling.draft_plan import DraftPart, DraftResult
from services.engine.settings import EngineSettings
from services.engine.start_check import check_start
from tests.unit.engine.assistant import expected_logits, make_assistant, make_target
from tests.unit.engine.loop.checked_graphs import CheckedGraphs

SETTINGS = EngineSettings(dtype="float32", device="cpu", kv_memory="16MiB", max_running=4)


class WatchedDrafts(AssistantDrafts):
    """Drafts that note the tokens of a sequence, and the draft tokens that were made behind."""

    made: ClassVar[list[tuple[list[int], list[int]]]] = []

    def make(self, parts: Sequence[DraftPart]) -> DraftResult:
        result = super().make(parts)
        for part, tokens in zip(parts, result.tokens, strict=True):
            self.made.append((part.sequence.tokens.tolist(), list(tokens)))
        return result


class PaddedDrafts(WatchedDrafts):
    """Drafts whose passes are padded as on a GPU."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reserve(StepCapacity(tokens=512, sequences=4, blocks=64), num_blocks=256)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
def test_assistant_drafts_what_transformers_drafts_and_keeps_the_answers(
    ordered: bool, padded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded passes run as graphs, at the addresses of a capture."""
    drafts = PaddedDrafts if padded else WatchedDrafts
    monkeypatch.setattr(draft_loader, "AssistantDrafts", drafts)
    monkeypatch.setattr(draft_model, "StepGraphs", CheckedGraphs)
    CheckedGraphs.runs = 0
    WatchedDrafts.made.clear()
    target = make_target(tmp_path / "model")
    assistant = make_assistant(tmp_path / "assistant", ordered=ordered)
    settings = replace(SETTINGS, model=tmp_path / "model", draft=str(tmp_path / "assistant"))
    check_start(settings)
    answers, sizes = [], []
    for each in (replace(settings, draft=""), settings):
        with Engine(tmp_path / "model", each) as engine:
            answers.append(
                [
                    engine.generate(
                        [5, 7, 11, token] * 4, max_tokens=30, temperature=0, ignore_eos=True
                    ).token_ids
                    for token in (1, 3)
                ]
            )
            counts = engine.loaded.steps.take_output().load.drafts
            sizes.append(engine.model.pool_bytes)
    assert answers[0] == answers[1]
    [count] = counts
    assert count.source == "draft_model"
    assert count.drafted > 0
    assert (CheckedGraphs.runs > count.drafts) is padded
    assert sizes[0] == sizes[1]
    for tokens, made in WatchedDrafts.made[:4]:
        ids = torch.tensor([*tokens, *made])
        split = len(tokens) - 1
        logits = expected_logits(target, assistant, ids[:split], ids[split:-1])
        assert logits.argmax(1).tolist() == made


def test_assistant_of_another_model_is_refused_in_one_sentence(tmp_path: Path) -> None:
    make_target(tmp_path / "model")
    make_assistant(tmp_path / "assistant", backbone=48)
    with pytest.raises(StartupError, match=r"--draft .*a width of 48") as error:
        Engine(tmp_path / "model", replace(SETTINGS, draft=str(tmp_path / "assistant")))
    assert "\n" not in str(error.value)
