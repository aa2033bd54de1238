"""The same random numbers in each run, and quick kernels in Triton's interpreter."""

from collections.abc import Iterator

import pytest
import torch

from tests.unit.engine.interpreter import quick_kernels


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Make Triton's interpreter run kernels in a fraction of its time."""
    with quick_kernels():
        yield


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """Start torch's default generator anew, so that a test that passes once passes always."""
    torch.manual_seed(0)
