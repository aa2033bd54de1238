"""Folder of the packed weights of models on demand, bounded by the size of its files."""

import os
from contextlib import suppress
from pathlib import Path

from tokenwire.user_folder import user_folder

__all__ = ["packed_folder", "trim"]


def packed_folder() -> Path | None:
    """Return $XDG_CACHE_HOME/tokenwire/packed, by default below ~/.cache, once it is there.

    None = it can't be written.
    """
    folder = user_folder("XDG_CACHE_HOME", ".cache") / "packed"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else None


def trim(folder: Path, most_bytes: int) -> None:
    """Remove the files that were not used for the longest time, until the rest has the size.

    An engine that reads a removed file reads it to its end.
    """
    with suppress(OSError):
        files = [(file, file.stat()) for file in folder.glob("*.packed")]
        total = sum(stat.st_size for _, stat in files)
        for file, stat in sorted(files, key=lambda each: each[1].st_mtime):
            if total <= most_bytes:
                break
            file.unlink()
            total -= stat.st_size
