"""Kernels in Triton's interpreter run quickly."""

from collections.abc import Iterator

import pytest

from tests.unit.engine.interpreter import quick_kernels


@pytest.fixture(scope="session", autouse=True)
def quick_interpreter() -> Iterator[None]:
    """Make Triton's interpreter run kernels in a fraction of its time."""
    with quick_kernels():
        yield
