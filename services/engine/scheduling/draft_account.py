"""Account of the seconds that drafts may take, so that wrong estimates cost little.

One balance holds the seconds that drafts have saved, and pays for drafts. Another one gets a small
share of the time of all steps, and pays for decisions and trials while nothing is drafted. Both are
booked by the measured seconds of the steps, and not by the estimates that have chosen the drafts.
"""

from dataclasses import dataclass

from services.engine.scheduling.draft_lengths import DraftLengths
from services.engine.scheduling.step_cost import StepTimes

__all__ = ["ComputedStep", "DraftAccount"]

_MOST_STEPS = 64
"""Steps without drafts whose time a balance holds at most"""
_ALLOWANCE = 0.01
"""Share of the time of all steps that trials may take"""
_NEAR = 4
"""Most size classes between the streams of a step and of the one that it is compared with"""


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """Size and duration of a step."""

    streams: int
    """Sequences whose newest token it computed"""
    rows: int
    """These tokens, with draft tokens"""
    drafted: int
    """Draft tokens of all sources"""
    has_prompts: bool
    seconds: float
    """Duration without the search for draft tokens"""
    quiet_steps: int
    """Number of steps before it for which nothing was done for drafts, and which are booked now"""
    quiet_seconds: float
    """Duration of these steps"""


class DraftAccount:
    """Time that the drafts of some sources have taken and saved."""

    def __init__(
        self, lengths: DraftLengths, first_steps: int, trial_steps: int, *, makes_passes: bool
    ) -> None:
        """makes_passes: a model makes the drafts, and not a search.

        first_steps, trial_steps: steps without drafts whose time drafts may take at first, and
        trials at once.
        """
        self._lengths = lengths
        self._first_steps, self._trial_steps = first_steps, trial_steps
        self._makes_passes = makes_passes
        self._plain = StepTimes(averages=True)
        """Seconds of steps for which nothing was done for drafts, by their streams"""
        self._overheads = StepTimes()
        """Seconds by which the host takes longer for a step with drafts, by its streams"""
        self.balance: float | None = None
        """Seconds that drafts may take; None = no step was measured"""
        self.trial_balance = 0.0
        """Seconds that trials may take"""
        self._most_trial = 0.0
        """Most seconds that trials may take at once"""
        self._passes = self._overhead = 0.0
        """Seconds of passes and of all else for drafts since the last step"""
        self._drafted = self._accepted = 0
        """Draft tokens that the newest step has verified, and the accepted ones"""

    @property
    def funds(self) -> float:
        """Seconds that drafts may take."""
        return self.balance or 0.0

    @property
    def has_full_trial(self) -> bool:
        """True if trials may take as long as they ever may."""
        return 0 < self._most_trial <= self.trial_balance

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

    def settle(self, step: ComputedStep, *, is_trial: bool) -> None:
        """Book a step. is_trial: trials pay for it."""
        allowed = self.trial_balance + _ALLOWANCE * (step.seconds + step.quiet_seconds)
        self.trial_balance = min(allowed, self._most_trial)
        is_idle = not self._passes and not self._overhead and not self._drafted
        if not step.streams or (is_trial and is_idle and self.balance is not None):
            self._learn_plain(step, is_idle)
            return
        plain = self._plain_seconds(step.streams)
        if plain is not None:
            self._most_trial = self._trial_steps * plain
            balance = self._first_steps * plain if self.balance is None else self.balance
            saved = -self._passes - self._take_overhead(step.streams)
            if self._drafted:
                share = min(self._drafted / max(step.drafted, 1), 1.0)
                saved += self._accepted / step.streams * plain
                saved -= share * self._delay(step, plain)
            if is_trial:
                self.trial_balance += min(saved, 0.0)
                saved = max(saved, 0.0)
            self.balance = min(max(balance + saved, 0.0), _MOST_STEPS * plain)
        self._learn_plain(step, is_idle)
        self._passes = self._overhead = 0.0
        self._drafted = self._accepted = 0

    def _learn_plain(self, step: ComputedStep, is_idle: bool) -> None:
        is_plain = is_idle or (not self._makes_passes and not self._drafted)
        if is_plain and step.streams and not step.drafted and not step.has_prompts:
            self._plain.learn(step.streams, step.seconds)

    def _plain_seconds(self, streams: int) -> float | None:
        """Return the seconds of a step without drafts; None = no step of this size was measured."""
        measured = self._plain.nearest(streams, _NEAR)
        return self._lengths.plain_seconds(streams) if measured is None else measured

    def _delay(self, step: ComputedStep, plain: float) -> float:
        """Return the seconds that draft tokens have added to a step."""
        estimate = self._lengths.slowdown(step.streams, step.rows) * plain
        # other programs make single steps longer, which says nothing about drafts
        seconds = estimate if step.has_prompts else min(step.seconds, 2 * estimate)
        return seconds - plain

    def _take_overhead(self, streams: int) -> float:
        """Return the overhead of the step, and update its estimate if the step has drafts."""
        if self._overhead and (self._passes or not self._makes_passes):
            self._overheads.learn(streams, self._overhead)
        # other programs make single steps longer, which says nothing about drafts
        known = self._overheads.nearest(streams)
        return self._overhead if known is None else min(self._overhead, 2 * known)
