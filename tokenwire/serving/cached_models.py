"""Models of the hub's cache that a running server downloads and removes."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import grpc

from services.common.model_files.disk_models import models_in_cache
from services.common.model_files.unknown_model import model_not_found
from tokenwire.errors import ServiceError
from tokenwire.serving.model_folders import default_folders, models_in
from tokenwire.serving.model_pulls import ModelPulls

__all__ = ["CachedModels"]


class CachedModels:
    """The models of the hub's cache, if the server serves them."""

    def __init__(self, folders: Sequence[Path], rescan: Callable[[], Awaitable[object]]) -> None:
        """folders: whose models are served. rescan: looks into them."""
        self.pulls = ModelPulls()
        self._folders = tuple(folders)
        self._rescan = rescan

    def require(self) -> None:
        """Raise FAILED_PRECONDITION unless the server serves the cache's models."""
        cache = {folder.absolute() for folder in default_folders()}
        if not cache & {folder.absolute() for folder in self._folders}:
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION,
                "PULLS_OFF",
                "This server does not serve the models of the hub's cache: start it with --models "
                "without a folder to download others.",
            )

    async def look_again(self) -> None:
        """Look for models that came or went."""
        await self._rescan()

    async def name_of(self, path: str) -> str:
        """Return the name by which the server has a new checkpoint; empty = it has it not."""
        await self._rescan()
        return await asyncio.to_thread(self._name_of, Path(path))

    def _name_of(self, path: Path) -> str:
        wanted, rows = path.resolve(), models_in(self._folders)
        return next((row.id for row in rows if row.path and row.path.resolve() == wanted), "")

    async def disk_name_of(self, name: str) -> str:
        """Return the name of a model on the disk. Raises NOT_FOUND."""
        return await asyncio.to_thread(self._disk_name_of, name)

    def _disk_name_of(self, name: str) -> str:
        rows = models_in(self._folders)
        row = next((row for row in rows if name in row.names), None)
        if row is not None and row.path is not None:
            wanted = row.path.resolve()
            for model in models_in_cache():
                if model.path.resolve() == wanted:
                    return model.name
        raise model_not_found(name)
