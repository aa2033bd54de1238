"""Fixtures: checkpoints that take images."""

import pytest

from tests.unit.tokenizer.images.checkpoints import KINDS, Seeing, seeing, write_kind


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seeing]:
    """Return a checkpoint of each kind."""
    directory = tmp_path_factory.mktemp("seeing")
    return {name: seeing(write_kind(directory / name, kind)) for name, kind in KINDS.items()}
