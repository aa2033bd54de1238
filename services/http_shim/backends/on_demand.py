"""Connection to a model on demand: requests load it, and wait until it serves."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from services.common.peers.waiting_room import WaitingRoom
from services.http_shim.backends.backend import Backend, BackendSettings
from services.http_shim.backends.connection import Connection
from services.http_shim.backends.model_manager import ModelManagerClient
from services.http_shim.backends.model_source import ServedModel
from services.http_shim.backends.model_use import ModelUse
from services.http_shim.backends.tokenizer_link import TokenizerLink, no_service
from services.http_shim.metrics import MODEL_WAITS
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.models.v1 import model_manager_pb2

__all__ = ["OnDemandConnection", "require_on_demand"]


class OnDemandConnection(Connection):
    """A model on demand, and the requests that use it."""

    on_demand = True

    def __init__(
        self, name: str, target: str, settings: BackendSettings, manager: ModelManagerClient
    ) -> None:
        """name: the model's full name in the catalog. target: of its tokenizer service."""
        self._demanded = _OnDemandBackend(target, settings, self._describe)
        super().__init__(target, settings, self._demanded)
        self._name = name
        self._target = target
        self._settings = settings
        self._manager = manager
        self._described: list[models_pb2.Model] = []
        """Last description of the model, which also stands for it while it is not loaded"""
        self._describing: asyncio.Task[None] | None = None

    @property
    def state(self) -> model_manager_pb2.Model | None:
        return self._manager.state(self._name)

    @property
    def waits_for_load(self) -> bool:
        return self._demanded.waits

    def load_progress(self) -> str:
        return self._demanded.progress()

    @contextmanager
    def lease(self, keep_alive: float | None = None) -> Iterator[Backend]:
        use = self._demanded.current_use
        if use is None or use.is_over or use.is_wanted:
            use = ModelUse(self._manager, self._name, self._demanded.note)
            self._demanded.current_use = use
        use.begin(keep_alive)
        try:
            with super().lease() as backend:
                yield backend
        finally:
            use.end()

    async def models(self) -> list[models_pb2.Model]:
        """Return the models that the service serves, as it said when it was last loaded."""
        async with self._reader() as backend:
            if backend is not None:
                self._described = await backend.models()
        return self._described

    async def is_ready(self) -> bool:
        return self._manager.is_connected

    async def close(self) -> None:
        if self._demanded.current_use is not None:
            self._demanded.current_use.close()
        await super().close()

    async def _status(self) -> models_pb2.ModelStatus | None:
        async with self._reader() as backend:
            return None if backend is None else await backend.status()

    @asynccontextmanager
    async def _reader(self) -> AsyncIterator[Backend | None]:
        """Yield a backend for questions, which do not count as a use; None if nothing is loaded."""
        state = self.state
        if self._demanded.is_connected:
            yield self._demanded
        elif state is None or state.state != model_manager_pb2.MODEL_STATE_LOADED:
            yield None
        else:
            backend = Backend(self._target, self._settings)
            try:
                yield backend
            finally:
                await backend.close()

    def _describe(self) -> None:
        """Ask a loaded model for its description."""
        self._describing = asyncio.create_task(self._note_description())

    async def _note_description(self) -> None:
        with suppress(ServiceError):
            await self.models()

    async def load(self, keep_alive: float | None) -> None:
        await self._manager.load(self._name, keep_alive)

    async def unload(self, *, force: bool) -> None:
        await self._manager.unload(self._name, force=force)


def require_on_demand(served: ServedModel, name: str, field: str) -> OnDemandConnection:
    """Return the connection to a model on demand. Raises INVALID_ARGUMENT for another model.

    name: the model's, as the client wrote it. field: the client's field that asks for a load.
    """
    if isinstance(served.connection, OnDemandConnection):
        return served.connection
    raise invalid(
        field,
        f"{name} stays in memory, because it is not loaded on demand: start the server with "
        "`tokenwire serve --models`, or give its row of the catalog on_demand = true.",
    )


class _OnDemandBackend(Backend):
    """The tokenizer service of a model on demand, which has an address only while it is used."""

    def __init__(
        self, target: str, settings: BackendSettings, on_connected: Callable[[], None]
    ) -> None:
        """on_connected: called when the model is in memory for a use."""
        super().__init__("", settings)
        self._on_connected = on_connected
        self.current_use: ModelUse | None = None
        self._target = target
        self._room = WaitingRoom(settings.max_waiting, "models to be loaded")

    @property
    def waits(self) -> bool:
        """True if requests wait for the model to be loaded."""
        return self.current_use is not None and not self.current_use.is_ready

    @property
    def is_connected(self) -> bool:
        return bool(self._peers.links)

    def progress(self) -> str:
        """Return what the load does, such as "loading 43 %"."""
        use = self.current_use
        if use is not None and use.is_queued:
            return "queued"
        share = None if use is None else use.progress
        return "loading" if share is None else f"loading {share:.0%}".replace("%", " %")

    def note(self, use: ModelUse) -> None:
        """Connect when a use is ready; disconnect when the last one is over.

        A new connection at each load needs no pause of an earlier one that has failed.
        """
        current = self.current_use
        if use.is_ready:
            self._peers.set_addresses({})
            self._peers.set_addresses({self._target: ""})
            self._on_connected()
        elif current is None or not current.is_ready:
            self._peers.set_addresses({})

    def choose(self) -> TokenizerLink | None:
        return None if self.waits else super().choose()

    async def wait_until_serving(self, error: ServiceError) -> None:
        """Wait until the model is in memory and serves. Raises ServiceError."""
        if self.current_use is not None and not self.current_use.is_ready:
            with self._room.place(), MODEL_WAITS.track_inprogress():
                await self.current_use.until_ready()
        await super().wait_until_serving(error)

    async def _link(self) -> TokenizerLink:
        if self.waits:
            await self.wait_until_serving(no_service())
        return await super()._link()
