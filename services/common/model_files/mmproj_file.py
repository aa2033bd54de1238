"""The mmproj files beside a GGUF model, which hold its vision tower and projector."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["is_mmproj", "mmproj_beside"]

_WORD = "mmproj"
_SNAPSHOTS = "snapshots"
"""Folder in the hub's cache that has a folder for each revision of a repository"""


def is_mmproj(file: Path) -> bool:
    """Return whether a file is an mmproj file by its name, as llama.cpp and the hub have them."""
    return file.suffix == ".gguf" and _WORD in file.name.lower()


def mmproj_beside(model: Path) -> Sequence[Path]:
    """Return the mmproj files in the directory of a GGUF file, by name.

    In the hub's cache, a quantisation may have a folder of its own, below that of the mmproj files.
    """
    model = model.absolute()
    folders = [model.parent]
    if model.parent.parent.parent.name == _SNAPSHOTS:
        folders.append(model.parent.parent)
    files = (sorted(folder.glob("*.gguf")) for folder in folders)
    found = ([each for each in those if is_mmproj(each) and each != model] for those in files)
    return next(filter(None, found), ())
