"""Rows of the models on disk."""

import shutil
from pathlib import Path

from tokenwire.serving.model_folders import models_in


def test_every_complete_checkpoint_has_a_row(tmp_path: Path, embedded_model: Path) -> None:
    """A half download in the list would be a model that can't be loaded."""
    shutil.copytree(embedded_model, tmp_path / "deep" / "small model")
    (tmp_path / "notes").mkdir()
    (tmp_path / "half.gguf").write_bytes(b"GGUF")
    rows = models_in([tmp_path, tmp_path])
    assert [(row.id, row.path, row.on_demand) for row in rows] == [
        ("small-model", tmp_path / "deep" / "small model", True)
    ]
