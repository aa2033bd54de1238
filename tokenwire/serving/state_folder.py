"""Folder of what Tokenwire keeps for a user between its runs."""

import os
from pathlib import Path

__all__ = ["state_folder"]


def state_folder() -> Path:
    """Return $XDG_STATE_HOME/tokenwire, by default ~/.local/state/tokenwire. It may not exist."""
    base = os.environ.get("XDG_STATE_HOME", "")
    # the XDG specification says to ignore a relative path
    root = Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state"
    return root / "tokenwire"
