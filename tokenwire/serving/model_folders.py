"""Rows of the models on disk that `tokenwire serve --models` serves."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from services.common.gguf.gguf_architectures import is_read
from services.common.model_files.catalog_file import CatalogModel
from services.common.model_files.checkpoint_folder import served_name
from services.common.model_files.disk_models import (
    DiskModel,
    hub_cache,
    models_in_cache,
    models_in_folder,
)

__all__ = ["default_folders", "models_in"]

_MOST_MODELS = 256
_NO_ID = re.compile(r"[^A-Za-z0-9._/@+:-]+")
_LONGEST_ID = 200


def default_folders() -> tuple[Path, ...]:
    """Return the folders of models that are looked into by default: the hub's cache."""
    return (hub_cache(),)


def models_in(folders: Sequence[Path]) -> list[CatalogModel]:
    """Return a row for each model below the folders, the first of each name.

    Interrupted downloads, and GGUF files of architectures that are not read, have none.
    """
    rows: dict[str, CatalogModel] = {}
    for name, model in _named(folders):
        if len(rows) < _MOST_MODELS and name and _is_served(model):
            row = CatalogModel(id=name, names=(name,), path=model.path, on_demand=True)
            rows.setdefault(name, row)
    return list(rows.values())


def _named(folders: Sequence[Path]) -> Iterator[tuple[str, DiskModel]]:
    """Yield models with their ids: those of the cache as `tokenwire list` names them."""
    for folder in folders:
        if folder.absolute() == hub_cache().absolute():
            for model in models_in_cache():
                yield model.name[:_LONGEST_ID], model
        else:
            for model in models_in_folder(folder.absolute()):
                name = _NO_ID.sub("-", served_name(model.path)).lstrip("-._/@+:")
                yield name[:_LONGEST_ID], model


def _is_served(model: DiskModel) -> bool:
    if not model.is_complete or not model.architecture:
        return False
    return model.path.suffix != ".gguf" or is_read(model.architecture)
