"""Fixtures of all tests: the embedded checkpoint, free ports, one running stack."""

import os

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")  # before any import of gRPC

import gc
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.stack import Stack, free_ports, served_stack
from tokenwire.serving.stack_layout import embedded_checkpoint

# A script that runs the tests in its background leaves SIGINT ignored, and nohup SIGHUP, in every
# command too. A handler here gives the commands under test the default disposition again.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)

# A slow machine must not fail a property test. `settings.default` has fixed examples in CI.
settings.register_profile(
    "untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")

_LONGEST = "test_compiled_kernels.py"
"""File of tests that compiles all kernels for all GPUs, in minutes"""

# Triton reads this where a kernel is defined, so it comes before any import of Triton.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exempt the modules and tests from garbage collection: they live to the end."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread the files whose tests wait for services over the whole run, by their share of it.

    Processes that run the tests take the files in this order. Tests of units compute, and the
    others mostly wait: side by side, they leave no core idle. Files of units take seconds, so they
    come last: a file of a minute would keep one process busy after the others have ended. The one
    that takes several minutes comes first.
    """
    places: dict[Path, float] = {}
    units = Path(__file__).parent / "unit"
    files = dict.fromkeys(item.path for item in items)
    for computes in (True, False):
        group = [file for file in files if file.is_relative_to(units) == computes]
        end = 1 if computes else 0.9
        places |= {file: end * place / len(group) for place, file in enumerate(group)}
    places |= {file: -1 for file in files if file.name == _LONGEST}
    items.sort(key=lambda item: places[item.path])


@pytest.fixture
def unused_ports() -> list[int]:
    """Five free ports."""
    return free_ports(5)


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    return embedded_checkpoint()


@pytest.fixture(scope="session")
def stack(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack for the session, started by `tokenwire serve` as a user starts it."""
    logs = tmp_path_factory.mktemp("logs")
    with served_stack(embedded_model, logs) as stack:
        yield stack
