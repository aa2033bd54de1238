"""Log file of a service, which rotates by size and is opened again on request."""

import os
from pathlib import Path

__all__ = ["LogFile"]

_OLD_FILES = 3
"""Full files that stay, as NAME.1 (the newest) to NAME.3"""


class LogFile:
    """File that lines are appended to. A line is never split and never lost."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        """Open the file. Raises OSError.

        most_bytes: size at which the file is full; 0 = no limit.
        """
        self._path = path
        self._most_bytes = most_bytes
        self._file = path.open("ab", buffering=0)

    def write(self, lines: bytes) -> None:
        """Append whole lines, then rotate if the file is full. Raises OSError."""
        rest = memoryview(lines)
        while rest:
            rest = rest[self._file.write(rest) :]
        if 0 < self._most_bytes <= os.fstat(self._file.fileno()).st_size:
            self._rotate()

    def reopen(self) -> None:
        """Open the path again, after another program has moved the file. Raises OSError."""
        opened = self._path.open("ab", buffering=0)  # before the close: a failure loses no line
        self._file.close()
        self._file = opened

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rotate(self) -> None:
        if self._is_current():  # else another process that writes to this path has rotated the file
            for number in range(_OLD_FILES - 1, 0, -1):
                if self._old(number).exists():
                    self._old(number).replace(self._old(number + 1))
            self._path.replace(self._old(1))
        self.reopen()

    def _is_current(self) -> bool:
        """Return whether the path still leads to the open file."""
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def _old(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
