"""Search for n-grams: where texts do not repeat, it must cost next to nothing."""

from services.engine.scheduling.draft_account import ComputedStep
from services.engine.scheduling.draft_lengths import DraftLengths
from services.engine.scheduling.search_budget import SearchBudget

PLAIN, SEARCH = 1.0, 0.05
"""Seconds of a step without drafts, and of a search"""


class Traffic:
    """Steps of sequences whose texts are searched as the budget allows."""

    def __init__(self, streams: int = 1, stalled: int = 0) -> None:
        """stalled: number of running sequences that miss the steps."""
        self.streams = streams
        self.stalled = stalled
        self.lengths = DraftLengths(rows_at_once=16)
        self.budget = SearchBudget(self.lengths)
        self.saved = 0.0
        """Seconds that drafts have saved, minus those that they and the searches have taken"""

    def run(self, steps: int, accepted: int = 0, drafted: int = 0, slowdown: float = 1.0) -> int:
        """Run steps. Return the number of those that were searched.

        accepted, drafted: draft tokens of each search. slowdown: of a step with draft tokens.
        """
        searched = 0
        for _ in range(steps):
            is_open = self.budget.is_open(self.streams + self.stalled)
            found = drafted if is_open else 0
            if is_open:
                searched += 1
                self.budget.add_search(SEARCH)
                self.saved -= SEARCH
            if found:
                self.budget.add_outcome(found, accepted)
                self.saved += accepted / self.streams * PLAIN - (slowdown - 1) * PLAIN
            seconds = slowdown * PLAIN if found else PLAIN
            rows = self.streams + found
            self.lengths.learn(rows, found, seconds)
            step = ComputedStep(self.streams, rows, found, False, seconds, 0, 0.0)
            self.budget.settle(step)
        return searched


def test_text_that_never_repeats_is_searched_for_one_percent_of_the_time() -> None:
    traffic = Traffic()
    assert traffic.run(400) < 400
    before = traffic.saved
    traffic.run(4000)
    assert before - traffic.saved < 0.012 * 4000 * PLAIN


def test_rejected_drafts_cost_no_more_than_trials_may() -> None:
    traffic = Traffic()
    traffic.run(400, accepted=0, drafted=4, slowdown=1.5)
    before = traffic.saved
    traffic.run(4000, accepted=0, drafted=4, slowdown=1.5)
    assert before - traffic.saved < 0.012 * 4000 * PLAIN


def test_accepted_drafts_keep_the_search_open() -> None:
    traffic = Traffic()
    assert traffic.run(1000, accepted=3, drafted=4, slowdown=1.5) >= 999


def test_trial_finds_that_texts_repeat_again() -> None:
    traffic = Traffic()
    traffic.run(2000)
    assert traffic.run(300, accepted=3, drafted=4, slowdown=1.5) > 50
    assert traffic.run(300, accepted=3, drafted=4, slowdown=1.5) == 300


def test_full_steps_are_not_searched_with_what_single_sequences_have_saved() -> None:
    """Rows of draft tokens cost more where many sequences run."""
    traffic = Traffic(streams=1)
    traffic.run(400, accepted=3, drafted=4, slowdown=1.5)
    traffic.streams = 32
    traffic.run(400, accepted=1, drafted=16, slowdown=1.5)
    assert traffic.run(1000, accepted=1, drafted=16, slowdown=1.5) < 50
    traffic.streams = 1
    assert traffic.run(100, accepted=3, drafted=4, slowdown=1.5) == 100


def test_sequences_that_stall_change_nothing() -> None:
    """Of eight running sequences, four wait for a client that reads slowly."""
    traffic = Traffic(streams=4, stalled=4)
    traffic.run(1000, accepted=0, drafted=8, slowdown=1.5)
    assert traffic.run(1000, accepted=0, drafted=8, slowdown=1.5) < 50
    traffic.run(500, accepted=7, drafted=8, slowdown=1.5)
    assert traffic.run(300, accepted=7, drafted=8, slowdown=1.5) == 300
