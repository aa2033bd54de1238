"""Budget of the search for n-grams, so that it costs little where texts do not repeat."""

from services.engine.scheduling.draft_account import ComputedStep, DraftAccount
from services.engine.scheduling.draft_lengths import DraftLengths

__all__ = ["SearchBudget"]

_FIRST_STEPS, _TRIAL_STEPS = 8, 2
"""Steps without drafts whose time drafts may take at first, and a trial"""
_BLIND_STEPS = 8
"""Steps with drafts after which one without them is measured, if none was before"""


class SearchBudget:
    """Decision whether texts are searched, by the time that the drafts found there have saved.

    The search stops once its drafts have cost more than they have saved. Then a small share of the
    time of all steps pays for trials, in which texts are searched as before. Steps of few and of
    many sequences have budgets of their own, because rows of draft tokens cost more in full steps.
    """

    def __init__(self, lengths: DraftLengths) -> None:
        self._lengths = lengths
        self._accounts: dict[int, DraftAccount] = {}
        """Account of each size class of steps, of which one makes a doubling"""
        self._in_trial: set[int] = set()
        """Size classes with a trial"""
        self._size = 0
        """Size class of the next step"""
        self._blind_steps = 0
        """Steps in a row that were booked without the time of one without drafts to compare with"""
        self.search_seconds = 0.0
        """Time of the searches since the last step, which the duration of the next one includes"""
        self._drafted = self._accepted = 0
        """Draft tokens that the present step has verified, and the accepted ones"""

    def is_open(self, streams: int) -> bool:
        """Return whether a step of so many sequences may have drafts of this source.

        The next step is booked for this size, even if some of the sequences miss it.
        """
        size = self._size = streams.bit_length()
        account = self._accounts.get(size)
        if account is None or account.balance is None:
            return self._blind_steps < _BLIND_STEPS
        return account.balance > 0 or size in self._in_trial

    def add_search(self, seconds: float) -> None:
        """Book the time of a search."""
        self.search_seconds += seconds

    def add_outcome(self, drafted: int, accepted: int) -> None:
        """Book a draft that the present step has verified."""
        self._drafted += drafted
        self._accepted += accepted

    def settle(self, step: ComputedStep) -> None:
        """Book a step."""
        size = self._size
        account = self._accounts.get(size)
        if account is None:
            account = DraftAccount(self._lengths, _FIRST_STEPS, _TRIAL_STEPS, makes_passes=False)
            self._accounts[size] = account
        account.add_overhead(self.search_seconds)
        account.add_outcome(self._drafted, self._accepted)
        self.search_seconds, self._drafted, self._accepted = 0.0, 0, 0
        account.settle(step, is_trial=account.balance == 0)
        self._blind_steps = self._blind_steps + 1 if account.balance is None else 0
        if account.has_full_trial:
            self._in_trial.add(size)
        elif account.trial_balance <= 0:
            self._in_trial.discard(size)
