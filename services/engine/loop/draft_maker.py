"""Draft tokens that are made or reported between steps."""

import logging
from collections.abc import Collection, Iterator, Sequence

from torch import Tensor

from services.engine.execution.draft_model import DraftModel
from services.engine.execution.head_drafts import HeadDrafts
from services.engine.messages import DraftTokens
from services.engine.scheduling.drafter import Drafter
from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["DraftMaker"]

_LOG = logging.getLogger("loop")


class DraftMaker:
    """The drafter of the scheduler, with the draft model that makes tokens for it."""

    def __init__(self, drafter: Drafter, model: DraftModel | None) -> None:
        """model: None = no model makes draft tokens."""
        self._drafter = drafter
        self._model = model

    def await_tokens(self) -> bool:
        """Do `Drafter.awaits_tokens`."""
        return self._drafter.awaits_tokens()

    def make(self, *, constrained: bool) -> bool:
        """Have the draft model make tokens where they are expected to save time.

        constrained: make tokens that need masks, or all others. The output does not depend on the
        draft model, so its failure ends the drafts alone. Returns False if that took no time.
        """
        if self._model is None or not self._drafter.is_model_due:
            return False
        began = self._model.host_clock()
        parts = self._drafter.plan_model(constrained=constrained)
        passes = 0.0
        if parts:
            try:
                made = self._model.make(parts)
            except Exception:
                self._give_up()
                return True
            self._drafter.take_made(parts, made)
            passes = sum(each.seconds for each in made.passes)
        self._drafter.add_overhead(self._model.host_clock() - began - passes)
        return True

    def wants_states(self, plan: StepPlan) -> Collection[TokenSequence] | None:
        """Return the sequences of a step whose hidden states a head will read; None = all."""
        if not isinstance(self._model, HeadDrafts):
            return ()
        return self._drafter.wants_states(plan)

    def keep_states(
        self,
        plan: StepPlan,
        tapped: Sequence[Tensor],
        wanted: Collection[TokenSequence] | None,
    ) -> None:
        """Keep hidden states of a step for the head.

        tapped: result of `Model.tapped`. wanted: result of `wants_states`.
        """
        if not isinstance(self._model, HeadDrafts):
            return
        began = self._model.host_clock()
        try:
            kept = self._model.keep(plan, tapped, wanted)
        except Exception:
            self._give_up()
        else:
            self._drafter.note_states(kept)
            self._drafter.add_overhead(self._model.host_clock() - began)

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
        self._drafter.end_model()
