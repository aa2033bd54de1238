"""Rows of the models on disk."""

import shutil
from pathlib import Path

import pytest

from services.common.model_files.catalog_file import catalog_id, read_catalog
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


@pytest.mark.parametrize("name", ["my model", "Smol ü", "模型", "_", "a" * 300, "\udcff", "-x-"])
def test_a_file_of_any_name_can_be_a_row(tmp_path: Path, name: str) -> None:
    """`tokenwire run "my model.gguf"` would end with the pattern of ids."""
    catalog = tmp_path / "catalog.toml"
    catalog.write_text(f'[[models]]\nid = "{catalog_id(name)}"\ntarget = "127.0.0.1:1"\n')
    assert [each.id for each in read_catalog(catalog)] == [catalog_id(name)]


def test_names_without_ascii_stay_different() -> None:
    """One of the two models would be missing from the list."""
    assert catalog_id("模型") != catalog_id("機械")
    assert catalog_id("smollm2:1.7b") == "smollm2:1.7b"
