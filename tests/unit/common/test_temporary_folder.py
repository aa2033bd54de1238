"""Temporary folders: their removal, by their process or by the next one."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from services.common.temporary_folder import TemporaryFolder, remove_abandoned

_HOLD = """
import sys
from services.common.temporary_folder import TemporaryFolder
folder = TemporaryFolder("files")
(folder.path / "content").write_text("secret")
print(folder.path, flush=True)
sys.stdin.read()
"""
_CHURN = """
from services.common.temporary_folder import TemporaryFolder
for _ in range(50):
    with TemporaryFolder() as path:
        (path / "content").write_text("secret")
        with TemporaryFolder("other"):
            assert (path / "content").read_text() == "secret"
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of temporary files, which is empty."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_folder_ends_with_its_context(place: Path) -> None:
    with TemporaryFolder("files") as path:
        assert path.parent == place
        assert path.name.startswith("tokenwire-files-")
        assert path.stat().st_mode & 0o077 == 0
        (path / "below").mkdir()
    assert list(place.iterdir()) == []


def test_folder_of_a_killed_process_is_removed_by_the_next_and_not_before() -> None:
    """Else each kill would leave files of clients, and the services' token, for ever."""
    command = [sys.executable, "-c", _HOLD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        path = Path(process.stdout.readline().strip())
        remove_abandoned()
        assert (path / "content").read_text() == "secret"
        process.kill()
        process.wait()
        assert path.exists()
        with TemporaryFolder():
            assert not path.exists()


def test_folders_of_others_stay(place: Path) -> None:
    """Another program may use such a name, as a server of an older version does."""
    unlocked = place / "tokenwire-backup"
    unlocked.mkdir()
    with TemporaryFolder() as path:
        lock = next(path.iterdir()).name
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / lock).touch()
    (place / "tokenwire-link").symlink_to(elsewhere)
    (place / "tokenwire-file").touch()
    remove_abandoned()
    assert (elsewhere / lock).exists()
    assert unlocked.is_dir()
    assert (place / "tokenwire-file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_folder_of_another_user_stays(place: Path) -> None:
    """Root, too, removes its own alone: the other user's server may run in a container."""
    with TemporaryFolder() as path:
        lock = next(path.iterdir()).name
    for name, owner in (("tokenwire-own", os.geteuid()), ("tokenwire-others", 12345)):
        (place / name).mkdir()
        (place / name / lock).touch()
        os.chown(place / name, owner, -1)
    remove_abandoned()
    assert [each.name for each in place.iterdir()] == ["tokenwire-others"]


def test_no_start_removes_the_folder_of_another_start(place: Path) -> None:
    """Servers that start at the same time would lose the token that their services need."""
    command = [sys.executable, "-c", _CHURN]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for process in started:
        _, complaints = process.communicate(timeout=120)
        assert process.returncode == 0, complaints
    assert list(place.iterdir()) == []
