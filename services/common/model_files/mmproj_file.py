"""The mmproj files beside a GGUF model, which hold its vision tower and projector."""

from collections.abc import Sequence
from pathlib import Path

__all__ = ["is_mmproj", "mmproj_beside"]

_WORD = "mmproj"


def is_mmproj(file: Path) -> bool:
    """Return whether a file is an mmproj file by its name, as llama.cpp and the hub have them."""
    return file.suffix == ".gguf" and _WORD in file.name.lower()


def mmproj_beside(model: Path) -> Sequence[Path]:
    """Return the mmproj files in the directory of a GGUF file, by name."""
    files = sorted(model.absolute().parent.glob("*.gguf"))
    return [file for file in files if is_mmproj(file) and file.name != model.name]
