"""Folders of a user, by the XDG Base Directory specification."""

import os
from pathlib import Path

__all__ = ["user_folder"]


def user_folder(variable: str, default: str) -> Path:
    """Return Tokenwire's folder below the one that a variable names. It may not exist.

    default: folder in the user's home that applies without the variable.
    """
    base = os.environ.get(variable, "")
    # the specification says to ignore a relative path
    root = Path(base) if os.path.isabs(base) else Path.home() / default
    return root / "tokenwire"
