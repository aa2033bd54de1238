"""The models of a catalog, which can be exchanged while requests run."""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

import grpc

from services.http_shim.backends.backend import RetryPolicy
from services.http_shim.backends.model_source import Connection, ServedModel, model_not_found
from services.http_shim.formats.model_cards import ModelCard, catalog_card
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.serving.catalog_file import CatalogError, CatalogModel, read_catalog

__all__ = ["Catalog"]

_LOG = logging.getLogger("catalog")
_ASK_SECONDS = 2.0  # that a list of models waits for each backend, and until it is asked again
_CARDS_AT_ONCE = 250  # of a list; more would hold other requests up


class Catalog:
    """Finds models by name. Make it on the event loop that uses it; raises CatalogError."""

    def __init__(self, path: Path, retry_policy: RetryPolicy) -> None:
        self._path = path
        self._retry_policy = retry_policy
        self._connections: dict[str, Connection] = {}
        self._retiring: set[asyncio.Task[None]] = set()
        self._comparing: set[asyncio.Task[None]] = set()
        self._replace(_read(path))

    def reload(self) -> None:
        """Read the file again. One that can't be used changes nothing."""
        try:
            self._replace(_read(self._path))
        except CatalogError as error:
            _LOG.error("%s The models from before stay.", error)
        else:
            _LOG.info("the catalog was read again", extra={"models": len(self._models)})

    def _replace(self, models: Sequence[CatalogModel]) -> None:
        """Serve these from now on. What runs on other backends ends in its own time."""
        targets = {model.target for model in models if model.target is not None}
        for target in self._connections.keys() - targets:
            retiring = asyncio.ensure_future(self._connections.pop(target).retire())
            self._retiring.add(retiring)
            retiring.add_done_callback(self._retiring.discard)
        for target in targets - self._connections.keys():
            self._connections[target] = Connection(target, self._retry_policy)
        self._models = tuple(models)
        self._by_name = {name: model for model in models for name in model.names}
        self._listed = [model for model in models if not model.variant]
        self._served = [model for model in self._listed if not model.is_placeholder]
        self._variants: dict[str, list[str]] = {model.full_name: [] for model in models}
        for model in models:
            if model.variant:
                self._variants[model.id].append(model.full_name)
        for comparing in self._comparing:
            comparing.cancel()
        self._comparing = {
            asyncio.ensure_future(self._compare_contexts(target))
            for target in {model.target for model in models if model.context is not None}
            if target is not None
        }

    def find(self, name: str | None) -> ServedModel:
        """The model of a name. Raises INVALID_ARGUMENT without a name and NOT_FOUND."""
        row = self._only() if name in (None, "", "default") else self._row(name or "")
        if row.target is None:
            raise ServiceError(
                grpc.StatusCode.NOT_FOUND,
                "MODEL_NOT_FOUND",
                f"The model {row.full_name} is listed, but nothing serves it here.",
                field="model",
            )
        return ServedModel(
            id=row.id,
            backend_name="",
            connection=self._connections[row.target],
            max_output_length=row.max_output_length,
            context=row.context,
        )

    async def id_of(self, served: ServedModel) -> str:
        return served.id

    async def require(self, names: Sequence[str]) -> None:
        """`find` judges all names."""

    async def cards(self) -> list[ModelCard]:
        """All models; variants are named in their model's card."""
        rows, variants = self._listed, self._variants
        targets = {row.target for row in rows}
        answers = await asyncio.gather(*map(self._described, targets))
        described = dict(zip(targets, answers, strict=True))
        cards: list[ModelCard] = []
        for row in rows:
            cards.append(catalog_card(row, variants[row.full_name], described[row.target]))
            if len(cards) % _CARDS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return cards

    async def card(self, name: str) -> ModelCard:
        """The model, or variant, of a name."""
        row = self._only() if name == "default" else self._row(name)
        variants = self._variants[row.full_name]
        return catalog_card(row, variants, await self._described(row.target))

    async def is_ready(self) -> bool:
        """Whether any backend would answer."""
        connections = list(self._connections.values())
        return any(await asyncio.gather(*[each.backend.is_ready() for each in connections]))

    async def close(self) -> None:
        """Cut what still runs."""
        for task in (*self._retiring, *self._comparing):
            task.cancel()
        for connection in self._connections.values():
            await connection.backend.close()

    def _row(self, name: str) -> CatalogModel:
        row = self._by_name.get(name)
        if row is None:
            raise model_not_found(name)
        return row

    def _only(self) -> CatalogModel:
        if len(self._served) != 1:
            raise invalid("model", "model is required: GET /v1/models lists those there are.")
        return self._served[0]

    async def _compare_contexts(self, target: str) -> None:
        """Tell of rows with more context than their model has, as soon as it can be asked."""
        while (model := await self._described(target)) is None:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(_ASK_SECONDS)
        for row in self._models:
            if row.target == target and (row.context or 0) > model.context_length:
                _LOG.warning(
                    "The catalog gives %s a context of %d tokens, its model has %d: those hold.",
                    row.full_name, row.context, model.context_length,
                )  # fmt: skip

    async def _described(self, target: str | None) -> completion_pb2.Model | None:
        """What the backend says of its model, if there is one and it can be asked."""
        if target is None:
            return None
        try:
            async with asyncio.timeout(_ASK_SECONDS):
                with self._connections[target].used() as backend:
                    models = await backend.models()
        except (ServiceError, TimeoutError):
            return None
        return models[0] if models else None


def _read(path: Path) -> tuple[CatalogModel, ...]:
    models = read_catalog(path)
    for model in models:
        if model.path is not None:
            raise CatalogError(
                f"The catalog {path} gives model {model.full_name} a path, which only "
                "`tokenwire serve` starts; give it a target."
            )
    return models
