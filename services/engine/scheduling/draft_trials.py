"""Trials of a draft model while nothing is drafted.

A trial is a few drafts of one sequence, which show whether draft tokens are accepted now. Trials
get rarer, up to a bound, as long as they show that drafts save nothing.
"""

from services.engine.scheduling.sequence import TokenSequence
from services.engine.scheduling.step_plan import StepPlan

__all__ = ["TRIAL_LENGTH", "TRIAL_RATE", "DraftTrials"]

TRIAL_LENGTH, TRIAL_RATE = 4, 0.8
"""Draft tokens of a trial's draft, and the acceptance that must be worth the time of trials"""
_DRAFTS = 4
"""Drafts of a trial"""
_FIRST_WAIT, _MOST_WAIT = 64, 2048
"""Fewest and most steps between two trials"""
_MOST_STEPS = 96
"""Steps after which a trial ends in any case"""
_PROMPT_STEPS = 32
"""Steps for which a trial waits for a prompt whose hidden states a head may read"""


class DraftTrials:
    """The present trial, and when the next one is due."""

    def __init__(self) -> None:
        self.sequence: TokenSequence | None = None
        """Sequence of the trial; None = there is none yet"""
        self.is_on = False
        """True while there is a trial, or one waits for a sequence"""
        self._wait = _FIRST_WAIT
        self._steps = 0
        """Number of steps of the present trial, or since the last one"""
        self._left = 0
        """Number of drafts that the trial may still have"""

    @property
    def is_due(self) -> bool:
        """True if a trial may begin."""
        return not self.is_on and self._steps >= self._wait

    def step(self, count: int) -> None:
        """Count steps. A trial that takes too long ends."""
        self._steps += count
        if self.is_on and self._steps >= _MOST_STEPS + _PROMPT_STEPS:
            self.end()

    def begin(self, sequence: TokenSequence | None) -> None:
        """Begin a trial. sequence: None = that of the next prompt, or of a later step."""
        self.is_on, self.sequence = True, sequence
        self._steps, self._left = 0, _DRAFTS
        self._wait = min(2 * self._wait, _MOST_WAIT)

    def choose(self, plan: StepPlan) -> TokenSequence | None:
        """Return the sequence of the trial, whose hidden states in the present step are wanted.

        A trial without a sequence gets one whose prompt begins. Where none comes, it gets one that
        runs: a head also drafts behind a context that begins late.
        """
        if self.sequence is None:
            prompts = (each.sequence for each in plan.chunks if not each.draft)
            self.sequence = next(prompts, None)
            if self.sequence is None and self._steps >= _PROMPT_STEPS and plan.decodes:
                self.sequence = max(plan.decodes, key=lambda each: each.room)
        return self.sequence

    def count(self) -> bool:
        """Count a draft that is made. Return False if the trial has had all its drafts."""
        self._left -= 1
        return self._left >= 0

    def learn(self, accepted: int) -> None:
        """Take the outcome of a draft of the trial, which ends with its last one."""
        if self._left <= 0 or (not accepted and self._left <= _DRAFTS - 2):
            self.end()

    def end(self) -> None:
        """End the trial."""
        self.is_on, self.sequence, self._steps = False, None, 0

    def repeat_soon(self) -> None:
        """Let the next trial come soon, because the last one has paid, or streams have ended."""
        self._wait = _FIRST_WAIT
