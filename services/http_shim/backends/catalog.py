"""Models of a catalog file, which can be reloaded while requests run."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc

from services.common.background import keep_running
from services.common.model_files.catalog_file import (
    NO_TOKEN,
    CatalogError,
    CatalogModel,
    read_catalog,
)
from services.common.model_files.unknown_model import model_not_found
from services.http_shim.backends.backend import BackendSettings
from services.http_shim.backends.connection import Connection
from services.http_shim.backends.model_manager import ModelManagerClient
from services.http_shim.backends.model_source import ListedModel, ServedModel, ServedStatus
from services.http_shim.backends.on_demand import OnDemandConnection
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.models.v1 import model_manager_pb2
from tokenwire.token_file import TokenError, TokenFile

__all__ = ["Catalog"]

_LOG = logging.getLogger("catalog")
_ASK_SECONDS = 2.0  # that a model list waits for a backend, and between two attempts


class Catalog:
    """Model source of a catalog file. Create it on the event loop that uses it."""

    def __init__(
        self, path: Path, settings: BackendSettings, manager: ModelManagerClient | None = None
    ) -> None:
        """Read the file. Raises CatalogError. manager: loads the models on demand."""
        self._path = path
        self._settings = settings
        self.manager = manager
        self._connections: dict[str, Connection] = {}
        self._targets: dict[str, tuple[Path | None, str]] = {}
        """Targets of the connections, with the files of their tokens and the names of models on
        demand"""
        self._retiring: set[asyncio.Task[None]] = set()
        self._context_checks: set[asyncio.Task[None]] = set()
        self._replace(_read(path))

    def reload(self) -> None:
        """Reload the file; an invalid file changes nothing."""
        try:
            self._replace(_read(self._path))
        except CatalogError as error:
            _LOG.error("%s The previous models stay.", error)
        else:
            _LOG.info("catalog reloaded", extra={"models": len(self._models)})

    def _replace(self, models: Sequence[CatalogModel]) -> None:
        """Serve these models. Requests on removed backends run to their end."""
        targets = self._targets_of(models)
        policies = {target: self._policy(file) for target, (file, _) in targets.items()}
        kept = targets.items() & self._targets.items()
        for target in self._connections.keys() - dict(kept).keys():
            retiring = asyncio.ensure_future(self._connections.pop(target).retire())
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
        for target in targets.keys() - self._connections.keys():
            self._connections[target] = self._connect(target, targets[target][1], policies[target])
        self._targets = targets
        self._models = tuple(models)
        self._by_name = {name: model for model in models for name in model.names}
        self._listed = [model for model in models if not model.variant]
        self._served = [model for model in self._listed if not model.is_placeholder]
        self._variants: dict[str, list[str]] = {model.full_name: [] for model in models}
        for model in models:
            if model.variant:
                self._variants[model.id].append(model.full_name)
        for check in self._context_checks:
            check.cancel()
        self._context_checks = {
            keep_running("catalog_check", partial(self._check_contexts, target))
            for target in {model.target for model in models if model.context is not None}
            if target is not None and not self._connections[target].on_demand
        }

    def _targets_of(self, models: Sequence[CatalogModel]) -> dict[str, tuple[Path | None, str]]:
        """Return the targets. Raises CatalogError for a model on demand that nobody can load."""
        targets: dict[str, tuple[Path | None, str]] = {}
        for model in models:
            if model.target is None:
                continue
            if model.on_demand and self.manager is None:
                raise CatalogError(
                    f"The model {model.full_name} of the catalog {self._path} is on demand, which "
                    "only `tokenwire serve` can load."
                )
            name = model.full_name if model.on_demand else ""
            if not (model.adapter_of and model.target in targets):
                targets.setdefault(model.target, (model.peer_token_file, name))
        return targets

    def _connect(self, target: str, name: str, settings: BackendSettings) -> Connection:
        """Return the connection to a target. name: of a model on demand; empty = it is none."""
        if name and self.manager is not None:
            return OnDemandConnection(name, target, settings, self.manager)
        return Connection(target, settings)

    def _policy(self, token_file: Path | None) -> BackendSettings:
        """Return the policy of a target. Raises CatalogError if its token can't be used."""
        if token_file is None:
            return self._settings
        if token_file == NO_TOKEN:
            return replace(self._settings, token=None)
        try:
            return replace(self._settings, token=TokenFile(token_file))
        except TokenError as error:
            raise CatalogError(str(error)) from None

    async def find(self, name: str | None) -> ServedModel:
        """Return the model of a name. Raises INVALID_ARGUMENT without a name, and NOT_FOUND."""
        row = self._only() if name in (None, "", "default") else await self._row(name or "")
        if row.target is None:
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                "MODEL_NOT_FOUND",
                f"The model {row.full_name} is listed but not served here.",
                field="model",
            )
        return ServedModel(
            id=row.id,
            backend_name=row.id if row.adapter_of else "",
            connection=self._connections[row.target],
            max_output_length=row.max_output_length,
            context=row.context,
        )

    async def id_of(self, served: ServedModel) -> str:
        return served.id

    async def require(self, names: Sequence[str]) -> None:
        """Do nothing: `find` knows every name."""

    async def listed(self) -> list[ListedModel]:
        """Return all models, each with its variants."""
        await self._rescan()
        rows, variants = self._listed, self._variants  # a reload replaces them
        targets = {row.target for row in rows}
        answers = await asyncio.gather(*map(self._describe, targets))
        described = dict(zip(targets, answers, strict=True))
        return [
            ListedModel(row, variants[row.full_name], described[row.target], self._state(row))
            for row in rows
        ]

    async def listed_as(self, name: str) -> ListedModel:
        """Return a model or a variant."""
        row = self._only() if name == "default" else await self._row(name)
        variants = self._variants[row.full_name]
        model = await self._describe(row.target)
        return ListedModel(row, variants, model, self._state(row))

    async def statuses(self) -> list[ServedStatus]:
        rows = [row for row in self._served if not row.adapter_of]
        connections = {
            row.target: self._connections[row.target] for row in rows if row.target is not None
        }
        answers = await asyncio.gather(*[each.status() for each in connections.values()])
        answered = dict(zip(connections, answers, strict=True))
        return [
            ServedStatus(
                row.full_name, answered.get(row.target or ""), self._state(row), row.on_demand
            )
            for row in rows
        ]

    async def is_ready(self) -> bool:
        connections = list(self._connections.values())
        return any(await asyncio.gather(*[each.is_ready() for each in connections]))

    async def close(self) -> None:
        tasks = (*self._retiring, *self._context_checks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._connections.values():
            await connection.close()
        if self.manager is not None:
            await self.manager.close()

    async def _row(self, name: str) -> CatalogModel:
        row = self._by_name.get(name)
        if row is None:
            await self._rescan()
            row = self._by_name.get(name)
        if row is None:
            raise model_not_found(name, self._by_name)
        return row

    async def _rescan(self) -> None:
        """Look for models that are new in the model folders."""
        if self.manager is not None and await self.manager.rescan():
            self.reload()

    def _state(self, row: CatalogModel) -> model_manager_pb2.Model | None:
        connection = self._connections.get(row.target or "")
        return None if connection is None else connection.state

    def _only(self) -> CatalogModel:
        models = [row for row in self._served if not row.adapter_of]
        if len(models) != 1:
            raise invalid("model", "model is required; GET /v1/models lists the models.")
        return models[0]

    async def _check_contexts(self, target: str) -> None:
        """Warn of rows with more context than their model has, once the backend answers."""
        while (model := await self._describe(target)) is None:  # noqa: ASYNC110 - no event to await
            await asyncio.sleep(_ASK_SECONDS)
        for row in self._models:
            if row.target == target and (row.context or 0) > model.context_length:
                _LOG.warning(
                    "The catalog gives %s a context of %d tokens; its model's %d tokens apply.",
                    row.full_name, row.context, model.context_length,
                )  # fmt: skip

    async def _describe(self, target: str | None) -> models_pb2.Model | None:
        """Return the backend's description of its model; None without an answer."""
        connection = self._connections.get(target or "")
        if connection is None:  # a placeholder, or removed by a reload
            return None
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                models = await connection.models()
        except (ServiceError, TimeoutError):
            return None
        return models[0] if models else None


def _read(path: Path) -> tuple[CatalogModel, ...]:
    models = read_catalog(path, may_be_empty=True)
    for model in models:
        if model.path is not None:
            raise CatalogError(
                f"The catalog {path} gives model {model.full_name} a path, which only "
                "`tokenwire serve` starts; give it a target."
            )
    return models
