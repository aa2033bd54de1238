"""Times of retries: a client that waits as long as it was told finds a place."""

import pytest

from services.engine.frontend.retry_clock import RetryClock


class Now:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def __call__(self) -> float:
        return self.seconds


def clock(tokens: int = 100) -> tuple[RetryClock, Now]:
    """Return a clock after sequences of this many tokens."""
    now = Now()
    made = RetryClock(now)
    for _ in range(200):
        made.on_finished(tokens)
    return made, now


def test_time_grows_with_the_queue_and_the_length_of_sequences() -> None:
    """At 1,000 tokens/s, ten sequences of 100 tokens end each second. The margin is a quarter."""
    times = [clock()[0].turn(1, waiting, 1000) for waiting in (0, 40, 400)]
    assert times == pytest.approx([1.0, 5.125, 50.125])
    assert clock(200)[0].turn(1, 40, 1000) == pytest.approx(10.25)


def test_refused_clients_come_again_one_after_the_other() -> None:
    made, now = clock()
    turns = [made.turn(1, 40, 1000) for _ in range(20)]
    assert turns == sorted(turns)
    assert turns[-1] - turns[0] == pytest.approx(2.375)
    assert made.turn(5, 40, 1000) == pytest.approx(turns[-1] + 0.625)
    now.seconds += 30
    assert made.turn(1, 40, 1000) == pytest.approx(5.125), "their turns are over"


def test_time_has_limits() -> None:
    made, _ = clock()
    assert made.turn(1, 10_000, 1000) == made.turn(1, 10_000, 1000) == pytest.approx(300)
    assert clock()[0].turn(1, 100, 1e9) == 1.0


def test_without_a_measured_rate_the_time_is_short() -> None:
    assert RetryClock().turn(1, 100, 0.0) == 1.0
    assert clock()[0].turn(1, 100, 0.0) == 1.0
