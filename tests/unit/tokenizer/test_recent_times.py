"""The status page's percentiles are those of the recent requests alone."""

from services.tokenizer.recent_times import RecentTimes, percentile


def test_old_times_leave_the_window() -> None:
    times = RecentTimes(window_seconds=10, most=100)
    times.add(0.0, 7.0)
    times.add(5.0, 2.0)
    times.add(6.0, 1.0)
    assert times.sorted(9.0) == [1.0, 2.0, 7.0]
    assert times.sorted(12.0) == [1.0, 2.0]
    assert times.sorted(20.0) == []


def test_memory_is_bounded_at_any_rate() -> None:
    times = RecentTimes(window_seconds=10, most=3)
    for second in range(5):
        times.add(0.0, float(second))
    assert times.sorted(0.0) == [2.0, 3.0, 4.0]


def test_percentile_is_a_value_that_was_measured() -> None:
    ascending = [float(value) for value in range(1, 101)]
    assert percentile(ascending, 0.5) == 50
    assert percentile(ascending, 0.95) == 95
    assert percentile([3.0], 0.95) == 3
    assert percentile([], 0.5) == 0
