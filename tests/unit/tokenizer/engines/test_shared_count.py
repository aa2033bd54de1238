"""Counts of an engine's work between its reports."""

from services.tokenizer.engines.shared_count import SharedCount


def test_own_work_counts_at_once_and_others_work_from_the_next_report() -> None:
    count = SharedCount()
    count.add(3)
    assert count.total == 3
    count.report(5)  # 2 of another process
    assert count.total == 5
    count.add(4)
    assert count.total == 9
    count.report(7)
    assert count.total == 7


def test_work_that_ended_after_the_engine_counted_it_is_not_taken_for_others() -> None:
    """An idle engine would look busy until its next report, and lose the next turn of a chat."""
    count = SharedCount()
    count.add(2)
    count.add(-2)
    count.report(2)
    assert count.total == 0
    count.report(2)  # this time nothing of this process ran
    assert count.total == 2


def test_lost_engine_has_own_work_alone() -> None:
    count = SharedCount()
    count.report(6)
    count.add(1)
    count.report(0)
    assert count.total == 1
