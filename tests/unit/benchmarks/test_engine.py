"""Tests of benchmarks.engine: the stopwatch of a step's parts."""

import time
from collections.abc import Iterator

import pytest

from benchmarks.engine import PARTS, Stopwatch
from services.engine.kernels.library import Kernel


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The time of perf_counter, which the test sets."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    yield now
    monkeypatch.undo()


def test_seconds_of_a_nested_part_count_once(clock: list[float]) -> None:
    watch = Stopwatch()

    def work(seconds: float) -> None:
        clock[0] += seconds

    inner = watch.timed("inner", work)

    def outer() -> None:
        work(1.0)
        inner(2.0)
        inner(3.0)
        work(4.0)

    watch.timed("outer", outer)()
    assert watch.seconds == {"inner": 5.0, "outer": 5.0}


def test_seconds_of_a_part_that_raises_are_counted(clock: list[float]) -> None:
    watch = Stopwatch()

    def fail() -> None:
        clock[0] += 2.0
        raise ValueError("no step")

    with pytest.raises(ValueError, match="no step"):
        watch.timed("part", fail)()
    watch.timed("part", lambda: None)()
    assert watch.seconds == {"part": 2.0}


def test_every_kernel_of_a_recorded_step_has_a_part() -> None:
    """Without it, the measurement of a model that runs such a kernel fails."""
    assert set(PARTS) == set(Kernel)
