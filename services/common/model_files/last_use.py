"""Time at which each model was last served: an empty file for each, whose mtime is the time.

File systems that are mounted with noatime or relatime don't say when a checkpoint was read.
"""

import contextlib
from pathlib import Path
from urllib.parse import quote

__all__ = ["last_use", "record_use"]

_LONGEST_NAME = 240
"""Bytes of a file's name that all file systems of Linux take, less some"""


def record_use(folder: Path, model: Path) -> None:
    """Note that a model is served now. A folder that can't be written is no error.

    folder: place of the records. model: directory of a checkpoint, or GGUF file.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _name(model)).touch()


def last_use(folder: Path, model: Path) -> float | None:
    """Return the Unix time at which a model was last served; None = it is not known."""
    try:
        return (folder / _name(model)).stat().st_mtime
    except OSError:
        return None


def _name(model: Path) -> str:
    return quote(str(model.absolute()), safe="")[-_LONGEST_NAME:]
