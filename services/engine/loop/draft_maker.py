"""Draft tokens that are made or reported between steps."""

import logging
from collections.abc import Iterator, Sequence

from torch import Tensor

from services.engine.execution.draft_model import DraftModel
from services.engine.execution.head_drafts import HeadDrafts
from services.engine.messages import DraftTokens
from services.engine.scheduling.drafter import Drafter
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["DraftMaker"]

_LOG = logging.getLogger("loop")


class DraftMaker:
    """The drafter of the scheduler, with the draft model that makes tokens for it."""

    def __init__(self, drafter: Drafter, model: DraftModel | None) -> None:
        """model: None = no model makes draft tokens."""
        self._drafter = drafter
        self._model = model

    def make(self, *, constrained: bool) -> None:
        """Have the draft model make tokens where they are expected to save time.

        constrained: make tokens that need masks, or all others. The output does not depend on the
        draft model, so its failure ends the drafts alone.
        """
        if self._model is None:
            return
        parts = self._drafter.plan_model(constrained=constrained)
        if not parts:
            return
        try:
            made = self._model.make(parts)
        except Exception:
            self._give_up()
        else:
            self._drafter.take_made(parts, made)

    @property
    def reads_states(self) -> bool:
        """True if a head reads the model's hidden states."""
        return isinstance(self._model, HeadDrafts)

    def keep_states(self, plan: StepPlan, tapped: Sequence[Tensor]) -> None:
        """Keep the hidden states of a step for the head. tapped: result of `Model.tapped`."""
        if not isinstance(self._model, HeadDrafts):
            return
        try:
            kept = self._model.keep(plan, tapped)
        except Exception:
            self._give_up()
        else:
            self._drafter.note_states(kept)

    def report(self) -> Iterator[DraftTokens]:
        """Return the draft tokens of constrained sequences: the next step needs their masks."""
        self.make(constrained=True)
        for sequence, draft in self._drafter.report():
            handle = sequence.request.command.handle
            yield DraftTokens(handle, sequence.index, list(draft))

    def _give_up(self) -> None:
        """End the drafts after an exception, which is logged."""
        _LOG.exception("the draft model failed; the engine goes on without it")
        self._model = None
