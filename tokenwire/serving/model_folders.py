"""Rows of the models on disk that `tokenwire serve --models` serves."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from services.common.gguf.gguf_architectures import is_read
from services.common.model_files.catalog_file import CatalogModel, catalog_id
from services.common.model_files.checkpoint_folder import served_name
from services.common.model_files.disk_models import (
    DiskModel,
    hub_cache,
    models_in_cache,
    models_in_folder,
)
from services.common.model_files.draft_heads import is_draft_head

__all__ = ["default_folders", "models_in"]

_MOST_MODELS = 256


def default_folders() -> tuple[Path, ...]:
    """Return the folders of models that are looked into by default: the hub's cache."""
    return (hub_cache(),)


def models_in(folders: Sequence[Path]) -> list[CatalogModel]:
    """Return a row for each model below the folders, the first of each name.

    Interrupted downloads, draft heads and GGUF files of unread architectures have none.
    """
    rows: dict[str, CatalogModel] = {}
    for name, model in _named(folders):
        if len(rows) < _MOST_MODELS and _is_served(model):
            row = CatalogModel(id=name, names=(name,), path=model.path, on_demand=True)
            rows.setdefault(name, row)
    return list(rows.values())


def _named(folders: Sequence[Path]) -> Iterator[tuple[str, DiskModel]]:
    """Yield models with their ids: those of the cache as `tokenwire list` names them."""
    for folder in folders:
        if folder.absolute() == hub_cache().absolute():
            for model in models_in_cache():
                yield catalog_id(model.name), model
        else:
            for model in models_in_folder(folder.absolute()):
                yield catalog_id(served_name(model.path)), model


def _is_served(model: DiskModel) -> bool:
    if not model.is_complete or not model.architecture or is_draft_head(model.architecture):
        return False
    return model.path.suffix != ".gguf" or is_read(model.architecture)
