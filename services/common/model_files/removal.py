"""Removal of a model from the hub's cache, and the processes that have it open."""

import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

from services.common.model_files.disk_models import DiskModel, gguf_parts, hub_cache

__all__ = ["RemovalError", "freed_bytes", "process_using", "remove"]

_PROCESSES = Path("/proc")
_REPOSITORIES = "models--"


class RemovalError(Exception):
    """The model is not removed. The message is one sentence."""


def freed_bytes(model: DiskModel) -> int:
    """Return the bytes that a removal frees: those of the files that no other model needs."""
    gone = _targets(_links(model)) - _targets(_other_links(model))
    return sum(file.stat().st_size for file in gone if file.is_file())


def remove(model: DiskModel) -> None:
    """Remove a model's files from the hub's cache, and its repository with the last model.

    Raises RemovalError for a model elsewhere, and OSError.
    """
    folder = model.cache_folder
    if folder is None or folder.parent != hub_cache() or not folder.name.startswith(_REPOSITORIES):
        raise RemovalError(f"{model.path} is not in the hub's cache: remove it yourself.")
    others = list(_other_links(model))
    if not any(link.suffix in (".safetensors", ".gguf") for link in others):
        shutil.rmtree(folder)
        return
    kept = _targets(others)
    for link in list(_links(model)):
        target = link.resolve()
        link.unlink()
        if target not in kept and target.is_relative_to(folder.resolve()):
            target.unlink(missing_ok=True)


def process_using(model: DiskModel) -> int | None:
    """Return the id of a process of this user that has a file of the model open, or serves it."""
    files = {str(file) for file in _targets(_links(model))}
    named = {str(model.path), str(model.path.resolve())}
    for process in sorted(_PROCESSES.glob("[0-9]*")):
        if int(process.name) != os.getpid() and (
            named & _arguments(process) or files & _open_files(process)
        ):
            return int(process.name)
    return None


def _other_links(model: DiskModel) -> Iterator[Path]:
    """Yield the links of the other models of a model's repository."""
    assert model.cache_folder is not None
    own = set(_links(model))
    for file in (model.cache_folder / "snapshots").rglob("*"):
        if not file.is_dir() and file not in own:
            yield file


def _links(model: DiskModel) -> Iterator[Path]:
    """Yield the links of a model's files in the cache.

    A directory has all files of its snapshot but the GGUF files, which are models by themselves.
    """
    if model.path.suffix == ".gguf":
        yield from gguf_parts(model.path)
        return
    for file in model.path.rglob("*"):
        if not file.is_dir() and file.suffix != ".gguf":
            yield file


def _targets(links: Iterable[Path]) -> set[Path]:
    return {link.resolve() for link in links}


def _arguments(process: Path) -> set[str]:
    try:
        return {
            part.decode("utf-8", "replace")
            for part in (process / "cmdline").read_bytes().split(b"\0")
        }
    except OSError:  # it has ended, or is another user's
        return set()


def _open_files(process: Path) -> set[str]:
    found: set[str] = set()
    try:
        for line in (process / "maps").read_text(errors="replace").splitlines():
            if "/" in line:
                found.add(line[line.index("/") :])
        found.update(os.readlink(link) for link in (process / "fd").iterdir())
    except OSError:
        pass
    return found
