"""Choice among kernels by their times, and by whether they compute the same."""

import logging
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from services.engine.model.attention import launch_times
from services.engine.model.attention.launch_times import fastest

SECONDS: dict[str, float] = {"usual": 100e-6, "as fast": 98e-6, "faster": 50e-6, "fastest": 10e-6}
OUTPUT = torch.tensor([1.0, -200.0])


@pytest.fixture(autouse=True)
def known_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the launches of a test name their kernel; a CPU has no graphs to time."""

    def seconds_of(launches: Sequence[Callable[[], Tensor]]) -> float:
        return SECONDS[getattr(launches[0], "kernel")]  # noqa: B009

    monkeypatch.setattr(launch_times, "seconds_of", seconds_of)


def kernel(name: str, output: Tensor = OUTPUT) -> list[Callable[[], Tensor]]:
    def launch() -> Tensor:
        return output

    launch.kernel = name  # type: ignore[attr-defined]
    return [launch]


def failing() -> Tensor:
    raise RuntimeError("no such instruction")


@pytest.mark.parametrize(
    ("others", "expected"), [(("as fast",), "usual"), (("as fast", "faster"), "faster")]
)
def test_usual_kernel_is_replaced_by_one_that_is_clearly_faster(
    others: tuple[str, ...], expected: str
) -> None:
    """Engines that start on the same GPU should compute alike."""
    candidates = {name: kernel(name) for name in ("usual", *others)}
    assert fastest(candidates, "usual", "product") == expected


def test_kernels_that_fail_or_differ_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """The first has the right output even if it is not the usual one."""
    candidates = {
        "faster": kernel("faster"),
        "usual": kernel("usual", OUTPUT + 0.5),
        "fails": [failing],
        "fastest": kernel("fastest", OUTPUT * 1.1),
    }
    with caplog.at_level(logging.WARNING):
        assert fastest(candidates, "usual", "product") == "faster"
    lost = sorted(record.getMessage() for record in caplog.records)
    assert lost == [
        "product: fails is not used: no such instruction",
        "product: fastest is not used: its output differs by 0.1 of the largest",
    ]


def test_usual_kernel_that_fails_is_replaced() -> None:
    candidates = {"as fast": kernel("as fast"), "usual": [failing]}
    assert fastest(candidates, "usual", "product") == "as fast"


def test_usual_kernel_runs_if_all_fail() -> None:
    assert fastest({"usual": [failing]}, "usual", "product") == "usual"
