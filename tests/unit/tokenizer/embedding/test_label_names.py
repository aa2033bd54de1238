"""Names of the labels in a checkpoint's config.json."""

import json
from pathlib import Path

import pytest

from services.common.settings import StartupError
from services.tokenizer.embedding.label_names import LabelNames


def test_labels_without_a_name_are_numbered(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": "calm", "2": "sad"}}))
    assert LabelNames(tmp_path).first(4) == ["calm", "LABEL_1", "sad", "LABEL_3"]


def test_checkpoint_without_a_config_names_none(tmp_path: Path) -> None:
    """A GGUF file has none."""
    assert LabelNames(tmp_path).first(2) == ["LABEL_0", "LABEL_1"]


def test_names_may_be_numbers(tmp_path: Path) -> None:
    """transformers accepts them."""
    (tmp_path / "config.json").write_text(json.dumps({"id2label": {"0": 3, "1": 4}}))
    assert LabelNames(tmp_path).first(2) == ["3", "4"]


def test_wrong_names_end_the_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"id2label": ["calm"]}))
    with pytest.raises(StartupError, match="id2label must be names by index"):
        LabelNames(tmp_path)
