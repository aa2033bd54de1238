"""Models on disk that `tokenwire serve --models` serves, by folder."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from services.common.model_files.catalog_file import CatalogModel
from services.common.model_files.checkpoint_folder import served_name
from services.common.model_files.quantisation import quantisation_of
from services.common.model_files.short_list import listed_models

__all__ = ["default_folders", "models_in"]

_MOST_MODELS = 256
_MOST_FOLDERS = 10_000
"""Bounds of one scan, so that a wrong folder, such as /, does not take for ever"""
_DEPTH = 3
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}$")
_REPOSITORY = re.compile(r"models--([\w.-]+?)--([\w.-]+)")
_NO_ID = re.compile(r"[^A-Za-z0-9._/@+:-]+")


def default_folders() -> tuple[Path, ...]:
    """Return the folders of models that are looked into by default: the hub's cache."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE),)


def models_in(folders: Sequence[Path]) -> list[CatalogModel]:
    """Return a row for each checkpoint and GGUF file below the folders, the first of each name."""
    rows: dict[str, CatalogModel] = {}
    for folder in folders:
        for path in _checkpoints(folder):
            name = _name(path)
            if name and name not in rows and len(rows) < _MOST_MODELS:
                rows[name] = CatalogModel(id=name, names=(name,), path=path, on_demand=True)
    return _with_hub_names(rows)


def _with_hub_names(rows: Mapping[str, CatalogModel]) -> list[CatalogModel]:
    """Return the rows with the names that the hub's models have there and in the short list."""
    taken = set(rows)
    named = []
    for row in rows.values():
        assert row.path is not None
        further = [name for name in _hub_names(row.path) if name not in taken]
        taken.update(further)
        named.append(replace(row, names=(*row.names, *further)))
    return named


def _hub_names(path: Path) -> Iterator[str]:
    """Yield owner/name:QUANTISATION, or owner/name, and short names of a model of the cache."""
    repository = next(filter(None, (_REPOSITORY.fullmatch(part) for part in path.parts)), None)
    if repository is None:
        return
    name = f"{repository[1]}/{repository[2]}"
    kind = quantisation_of(path.name) if path.suffix == ".gguf" else None
    source = f"{name}:{kind}" if kind else name
    yield source
    for row in listed_models():
        if row.source == source:
            yield row.name
            yield from row.aliases


def _name(path: Path) -> str:
    """Return the name of a model: owner/name from the hub's cache, else the file's or folder's."""
    repository = next(filter(None, (_REPOSITORY.fullmatch(part) for part in path.parts)), None)
    if repository is not None and path.suffix != ".gguf":
        return f"{repository[1]}/{repository[2]}"
    return _NO_ID.sub("-", served_name(path)).lstrip("-._/@+:")[:200]


def _checkpoints(folder: Path) -> Iterator[Path]:
    """Yield the checkpoints below a folder, in the order of their paths."""
    visited = 0
    pending = [(folder.absolute(), 0)]
    while pending and visited < _MOST_FOLDERS:
        here, depth = pending.pop()
        visited += 1
        try:
            entries = sorted(os.scandir(here), key=lambda entry: entry.name)
        except OSError:
            continue
        names = {entry.name for entry in entries}
        ggufs = [name for name in names if name.endswith(".gguf") and _is_model(name)]
        if "config.json" in names and any(name.endswith(".safetensors") for name in names):
            yield here
            continue
        yield from (here / name for name in sorted(ggufs))
        if depth < _DEPTH:
            below = [entry for entry in entries if _is_folder(entry)]
            pending += [(here / entry.name, depth + 1) for entry in reversed(below)]


def _is_model(name: str) -> bool:
    stem = name.removesuffix(".gguf")
    return not (_LATER_PART.search(stem) or stem.startswith("mmproj"))


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    return entry.is_dir() and not entry.is_symlink() and not entry.name.startswith(".")
