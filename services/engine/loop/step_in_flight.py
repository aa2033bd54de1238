"""Step in flight: a launched step whose results the host does not have yet."""

from dataclasses import dataclass

import torch

from services.engine.batch.transfer import Mark
from services.engine.execution.batch_builder import DeviceTokens
from services.engine.loop.draws import LaunchedDraws
from services.engine.loop.step_sampler import PromptResults
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["StepInFlight"]


@dataclass(slots=True)
class StepInFlight:
    """A launched step whose results the host does not have yet."""

    plan: StepPlan | None
    """Plan of the step; None = the step's duration says nothing about the plan"""
    started: float
    """Time of the start, on the loop's clock, in seconds"""
    end: Mark
    """Mark behind the launches of the forward pass"""
    results: PromptResults
    launched: list[LaunchedDraws]
    """Draws from the step's logits, and from logits that were held before the step"""

    @property
    def has_results(self) -> bool:
        """True if the step has tokens or prompt results for the host."""
        return bool(self.launched or self.results.scores or self.results.scored)

    @property
    def verifies_drafts(self) -> bool:
        """True if sequences that otherwise run ahead wait for tokens, which verify their drafts."""
        return any(
            launched.held and launched.draws[0].sequence.request.runs_ahead
            for launched in self.launched
        )

    @property
    def drawn(self) -> DeviceTokens | None:
        """Newest tokens of the step's sequences on the device, for the next step to read."""
        continuing = [launched for launched in self.launched if not launched.held]
        if not continuing:
            return None
        draws = [draw for launched in continuing for draw in launched.draws]
        ids = [launched.tokens.on_device for launched in continuing]
        return DeviceTokens(
            ids[0] if len(ids) == 1 else torch.cat(ids),
            {draw.sequence: i for i, draw in enumerate(draws)},
        )
