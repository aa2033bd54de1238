"""Tests of benchmarks.engine: room for the sequences, and the stopwatch of a step's parts."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.engine import PARTS, MeasuredEngine, Stopwatch
from services.engine.kernels.library import Kernel
from services.engine.messages import Token
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.files import make_checkpoint


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


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "qwen3.5", "falcon mamba", "granite hybrid", "lfm2"]
)
def test_sequences_of_every_kind_of_layer_decode_side_by_side(family: str, tmp_path: Path) -> None:
    """A cache without room for their pages or states would preempt some, or refuse to start."""
    make_checkpoint(tmp_path, CONFIGS[family])
    with MeasuredEngine(tmp_path, "float32", 512, streams=3) as engine:
        keeps_states = engine.state_bytes > 0
        assert keeps_states == (family not in ("llama", "gemma3"))
        assert (engine.kv_bytes_per_token > 0) == (family != "falcon mamba")
        with engine.decoding(3, 64, 8):
            for _ in range(4):
                drawn = [output for output in engine.step() if isinstance(output, Token)]
                assert len(drawn) == 3
