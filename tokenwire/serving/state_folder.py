"""Folder of what Tokenwire keeps for a user between its runs."""

from pathlib import Path

from services.common.model_files.last_use import last_use, record_use
from tokenwire.user_folder import user_folder

__all__ = ["note_use", "state_folder", "used_at"]

_USES = "last-use"


def state_folder() -> Path:
    """Return $XDG_STATE_HOME/tokenwire, by default ~/.local/state/tokenwire. It may not exist."""
    return user_folder("XDG_STATE_HOME", ".local/state")


def note_use(model: Path) -> None:
    """Note that a model is served now. model: directory of a checkpoint, or GGUF file."""
    record_use(state_folder() / _USES, model)


def used_at(model: Path) -> float | None:
    """Return the Unix time at which a model was last served; None = it is not known."""
    return last_use(state_folder() / _USES, model)
