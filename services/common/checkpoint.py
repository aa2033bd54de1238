"""The checkpoint that a service was given, as a directory in Hugging Face form."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from services.common.gguf.checkpoint_files import write_checkpoint
from services.common.gguf.gguf_file import GgufError
from services.common.settings import CheckpointSettings, ServerSettings, StartupError
from tokenwire.serving.checkpoint_folder import (
    CheckpointFolderError,
    gguf_of,
    require_readable,
    served_name,
)

__all__ = ["opened", "opened_checkpoint"]

S = TypeVar("S", bound=ServerSettings)


@contextmanager
def opened(settings: S) -> Iterator[S]:
    """Yield the settings with the directory of their checkpoint, and the name of their model.

    Raises StartupError for a path that holds no checkpoint that is read.
    """
    if not isinstance(settings, CheckpointSettings):
        yield settings
        return
    with opened_checkpoint(settings.model) as directory:
        name = settings.model_id or served_name(settings.model)
        yield replace(settings, model=directory, model_id=name)


@contextmanager
def opened_checkpoint(path: Path) -> Iterator[Path]:
    """Yield the directory of a checkpoint; that of a GGUF file is made, and removed at the end.

    Raises StartupError for a path that holds no checkpoint that is read.
    """
    if path == Path():
        raise StartupError("--model must name the directory of a checkpoint, or a GGUF file.")
    try:
        require_readable(path)
    except CheckpointFolderError as error:
        raise StartupError(str(error)) from None
    file = gguf_of(path)
    if file is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="tokenwire-gguf-") as directory:
        try:
            write_checkpoint(file, Path(directory))
        except GgufError as error:
            raise StartupError(str(error)) from None
        yield Path(directory)
