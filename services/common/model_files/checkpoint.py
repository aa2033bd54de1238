"""A service's checkpoint as a directory in Hugging Face form."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from services.common.gguf.checkpoint_files import write_checkpoint
from services.common.gguf.gguf_file import GgufError
from services.common.model_files.checkpoint_folder import (
    CheckpointFolderError,
    gguf_of,
    require_readable,
    served_name,
)
from services.common.model_files.mmproj_file import mmproj_beside
from services.common.process import collector_paused
from services.common.settings import CheckpointSettings, ServerSettings, StartupError
from services.common.temporary_folder import TemporaryFolder
from services.common.tokenizer_files.definition import TokenizerError
from services.common.tokenizer_files.other_tokenizers import (
    find_other_tokenizer,
    read_other_tokenizer,
)

__all__ = ["opened", "opened_checkpoint"]

_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
S = TypeVar("S", bound=ServerSettings)


@contextmanager
def opened(settings: S) -> Iterator[S]:
    """Yield the settings with the checkpoint's directory and the model's name filled in.

    Raises StartupError for a path that holds no supported checkpoint.
    """
    if not isinstance(settings, CheckpointSettings):
        yield settings
        return
    with opened_checkpoint(settings.model, settings.mmproj) as directory:
        name = settings.model_id or served_name(settings.model)
        yield replace(settings, model=directory, model_id=name)


@contextmanager
def opened_checkpoint(path: Path, mmproj: str | None = None) -> Iterator[Path]:
    """Yield the directory of a checkpoint in Hugging Face form.

    mmproj: file with the vision tower of a GGUF file's model; empty = the one beside the model, if
    one fits; None = text alone is read.

    For a GGUF file, and for a directory whose tokenizer is not a tokenizer.json, the directory is
    temporary and removed at the end. Raises StartupError for a path that holds no checkpoint.
    """
    if path == Path():
        raise StartupError("--model must name the directory of a checkpoint, or a GGUF file.")
    try:
        require_readable(path)
    except CheckpointFolderError as error:
        raise StartupError(str(error)) from None
    gguf = gguf_of(path)
    if mmproj and gguf is None:
        raise StartupError(f"--mmproj {mmproj} needs a model in a GGUF file. Start without it.")
    other = None if gguf or (path / _TOKENIZER).exists() else find_other_tokenizer(path)
    if gguf is None and other is None:
        yield path
        return
    with TemporaryFolder("checkpoint") as directory:
        try:
            if gguf is not None:
                with collector_paused():  # each collection would visit every token
                    _write_gguf(gguf, directory, mmproj)
            elif other is not None:
                _write_tokenizer(other, directory)
        except GgufError as error:
            raise StartupError(str(error)) from None
        except TokenizerError as error:
            raise StartupError(f"{other} is not read: {error}.") from None
        yield directory


def _write_gguf(file: Path, directory: Path, mmproj: str | None) -> None:
    """Write the directory of a GGUF file. mmproj: as in `opened_checkpoint`. Raises GgufError."""
    if mmproj:
        write_checkpoint(file, directory, [Path(mmproj)], needs_mmproj=True)
    else:
        write_checkpoint(file, directory, () if mmproj is None else mmproj_beside(file))


def _write_tokenizer(file: Path, directory: Path) -> None:
    """Write the tokenizer as tokenizer.json, and links to all other files beside it."""
    made = dict(zip((_TOKENIZER, _CONFIG), read_other_tokenizer(file), strict=True))
    for beside in file.parent.absolute().iterdir():
        if beside.name not in made:
            (directory / beside.name).symlink_to(beside)
    for name, content in made.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
