"""Fixture of a tiny model."""

import pytest

from services.engine.model.model import Model
from tests.unit.engine.tiny import load_tiny


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load_tiny(tmp_path_factory.mktemp("tiny"))
