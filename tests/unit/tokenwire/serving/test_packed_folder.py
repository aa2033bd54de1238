"""Folder of packed weights: it is bounded, and the files in use stay."""

import os
from pathlib import Path

import pytest

from tokenwire.serving.packed_folder import packed_folder, trim


def test_files_that_were_not_used_for_long_leave_first(tmp_path: Path) -> None:
    """Else each model that was ever served would take its size of the disk for ever."""
    for age, name in enumerate(("new", "middle", "old")):
        file = tmp_path / f"{name}.packed"
        file.write_bytes(bytes(100))
        os.utime(file, (1000 - age, 1000 - age))
    other = tmp_path / "notes.txt"
    other.write_bytes(bytes(1000))
    trim(tmp_path, 200)
    assert sorted(file.stem for file in tmp_path.glob("*.packed")) == ["middle", "new"]
    trim(tmp_path, 0)
    assert list(tmp_path.iterdir()) == [other]


def test_a_home_that_cannot_be_written_has_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenwire").write_text("a file in its place")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert packed_folder() is None
