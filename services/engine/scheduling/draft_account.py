"""Account of the seconds that drafts may take, so that wrong estimates cost little.

One balance holds the seconds that drafts have saved, and pays for drafts. Another one gets a small
share of the time of all steps, and pays for decisions and trials while nothing is drafted.
"""

from services.engine.scheduling.draft_lengths import DraftLengths
from services.engine.scheduling.step_cost import StepTimes

__all__ = ["DraftAccount"]

_MOST_STEPS, _FIRST_STEPS = 64, 32
"""Steps without drafts whose time a balance holds at most, and that of drafts at first"""
_ALLOWANCE = 0.01
"""Share of the time of all steps that trials may take"""


class DraftAccount:
    """Time that drafts have taken and saved."""

    def __init__(self, lengths: DraftLengths) -> None:
        self._lengths = lengths
        self._overheads = StepTimes()
        """Seconds by which the host takes longer for a step with drafts, by its streams"""
        self.balance: float | None = None
        """Seconds that drafts may take; None = no step was measured"""
        self.trial_balance = 0.0
        """Seconds that trials may take"""
        self._most = 0.0
        """Most seconds of a balance"""
        self._passes = self._overhead = 0.0
        """Seconds of passes and of all else for drafts since the last step"""
        self._drafted = self._accepted = 0
        """Draft tokens that the newest step has verified, and the accepted ones"""

    @property
    def funds(self) -> float:
        """Seconds that drafts may take."""
        return self.balance or 0.0

    def overhead(self, streams: int) -> float:
        """Return the seconds by which drafts lengthen a step besides their passes and rows."""
        return self._overheads.nearest(streams) or 0.0

    def add_pass(self, seconds: float) -> None:
        """Book a pass of the draft model."""
        self._passes += seconds

    def add_overhead(self, seconds: float) -> None:
        """Book what the host has done for drafts."""
        self._overhead += seconds

    def add_outcome(self, drafted: int, accepted: int) -> None:
        """Book a draft that the present step has verified."""
        self._drafted += drafted
        self._accepted += accepted

    def settle(
        self, streams: int, rows: int, drafted: int, seconds: float, *, is_trial: bool
    ) -> None:
        """Book a step.

        streams: sequences whose newest token it computed; rows: these tokens, with draft tokens;
        drafted: draft tokens of all sources. is_trial: trials pay for it.
        """
        self.trial_balance = min(self.trial_balance + _ALLOWANCE * seconds, self._most)
        idle = is_trial and not self._passes and not self._overhead and not self._drafted
        if not streams or (idle and self.balance is not None):
            return
        plain = self._lengths.plain_seconds(streams)
        if plain is not None:
            self._most = _MOST_STEPS * plain
            balance = _FIRST_STEPS * plain if self.balance is None else self.balance
            saved = -self._passes - self._take_overhead(streams)
            if self._drafted:
                share = min(self._drafted / max(drafted, 1), 1.0)
                saved += self._accepted / streams * plain
                saved -= share * (self._lengths.slowdown(streams, rows) - 1) * plain
            if is_trial:
                self.trial_balance += min(saved, 0.0)
                saved = max(saved, 0.0)
            self.balance = min(max(balance + saved, 0.0), self._most)
        self._passes = self._overhead = 0.0
        self._drafted = self._accepted = 0

    def _take_overhead(self, streams: int) -> float:
        """Return the overhead of the step, and update its estimate if the step has drafts."""
        if self._passes and self._overhead:
            self._overheads.learn(streams, self._overhead)
        # other programs make single steps longer, which says nothing about drafts
        known = self._overheads.nearest(streams)
        return self._overhead if known is None else min(self._overhead, 2 * known)
