"""Draft tokens that are made or reported between steps."""

import logging
from collections.abc import Iterator

from services.engine.execution.draft_model import DraftModel
from services.engine.messages import DraftTokens
from services.engine.scheduling.drafter import Drafter

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
            _LOG.exception("the draft model failed; the engine goes on without it")
            self._model = None
        else:
            self._drafter.take_made(parts, made)

    def report(self) -> Iterator[DraftTokens]:
        """Return the draft tokens of constrained sequences: the next step needs their masks."""
        self.make(constrained=True)
        for sequence, draft in self._drafter.report():
            handle = sequence.request.command.handle
            yield DraftTokens(handle, sequence.index, list(draft))
