"""Temporary folders that the next start removes if their process is killed.

A lock on a file in the folder says whether its process lives: the kernel ends the lock with the
process, whereas the number of a dead process may belong to another one.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path
from types import TracebackType

__all__ = ["TemporaryFolder", "remove_abandoned"]

_PREFIX = "tokenwire-"
_LOCK, _NEW_LOCK = ".tokenwire-lock", ".tokenwire-new-lock"
"""Name of the lock file, and its name until it is locked"""


class TemporaryFolder:
    """A folder that only this user may read, below the system's folder of temporary files."""

    def __init__(self, kind: str = "") -> None:
        """Make the folder, after those that killed processes have left are removed.

        kind: what it holds, as a part of its name. Raises OSError.
        """
        remove_abandoned()
        self.path = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{kind}-" if kind else _PREFIX))
        new = self.path / _NEW_LOCK
        self._lock = os.open(new, os.O_RDONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: the folder stays
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.path / _LOCK)  # others see the file only while it is locked

    def remove(self) -> None:
        """Remove the folder with its content."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    def __enter__(self) -> Path:
        return self.path

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.remove()


def remove_abandoned() -> None:
    """Remove this user's temporary folders whose processes have ended without removing them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it
            if _is_own_folder(folder):
                _remove_if_unlocked(folder)


def _is_own_folder(folder: Path) -> bool:
    """Return whether a path is a directory of this user, and no link to one."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _remove_if_unlocked(folder: Path) -> None:
    """Remove a folder whose lock nobody holds. Raises OSError if it has none, or it is held."""
    lock = os.open(folder / _LOCK, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_nlink:  # else another process has removed the folder meanwhile
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)
