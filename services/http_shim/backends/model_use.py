"""Use of a model on demand: one stream to the manager for all requests that need the model."""

import asyncio
from collections.abc import AsyncIterator, Callable

import grpc

from services.http_shim.backends.model_manager import ModelManagerClient, manager_error, on_wire
from tokenwire.errors import ServiceError
from tokenwire.pb.models.v1 import model_manager_pb2 as pb

__all__ = ["ModelUse"]

_LINGER_SECONDS = 1.0
"""Time after the last request before the stream ends, so that a burst of requests needs one"""


class ModelUse:
    """A stream that keeps a model in memory, and the number of requests that need it."""

    def __init__(
        self, manager: ModelManagerClient, model: str, on_changed: Callable[["ModelUse"], None]
    ) -> None:
        """on_changed: called when the model is ready, and when the use is over."""
        self.is_ready = False
        """True if the model is in memory"""
        self.is_wanted = False
        """True if another model waits for the memory: new requests need a new use"""
        self.error: ServiceError | None = None
        """Reason for the end; None = the use goes on, or was closed"""
        self.progress: float | None = None
        self.is_queued = False
        self._manager = manager
        self._model = model
        self._on_changed = on_changed
        self._users = 0
        self._keep_alive: float | None = None
        self._requests: asyncio.Queue[pb.UseModelRequest] = asyncio.Queue()
        self._changed = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_closed = False
        """True from the call of `close`, which the stream follows later"""

    @property
    def is_over(self) -> bool:
        has_ended = self._task is not None and self._task.done()
        return self._is_closed or has_ended or self.error is not None

    def begin(self, keep_alive: float | None) -> None:
        """Count a request. keep_alive: seconds that the model stays; None = as the catalog says."""
        self._users += 1
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        if self._task is None:
            self._send(keep_alive)
            self._task = asyncio.create_task(self._run())
        elif keep_alive != self._keep_alive:
            self._send(keep_alive)

    def end(self) -> None:
        """Count a request less; the stream ends after the last one."""
        self._users -= 1
        if self._users:
            return
        if self.is_wanted or self._keep_alive == 0:
            self.close()
        else:
            self._linger = asyncio.get_running_loop().call_later(_LINGER_SECONDS, self.close)

    async def until_ready(self) -> None:
        """Wait until the model is in memory. Raises ServiceError if it is not loaded."""
        await self._changed.wait()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """End the stream."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()

    def _send(self, keep_alive: float | None) -> None:
        self._keep_alive = keep_alive
        seconds = on_wire(keep_alive)
        request = pb.UseModelRequest(model=self._model, keep_alive_seconds=seconds)
        self._requests.put_nowait(request)

    async def _run(self) -> None:
        call = self._manager.use(self._sent())
        try:
            async for event in call:
                self._note(event)
                if self.error is not None:
                    break
            else:
                self.error = self.error or _ended()
        except grpc.aio.AioRpcError as error:
            self.error = manager_error(error)
        finally:
            call.cancel()
            self.is_ready = False
            self._changed.set()
            self._on_changed(self)

    async def _sent(self) -> AsyncIterator[pb.UseModelRequest]:
        while True:
            yield await self._requests.get()

    def _note(self, event: pb.UseModelResponse) -> None:
        kind = event.WhichOneof("event")
        self.is_queued = kind == "queued"
        if kind == "loading":
            self.progress = event.loading.progress if event.loading.HasField("progress") else None
        elif kind == "ready":
            self.is_ready = True
            self._on_changed(self)
            self._changed.set()
        elif kind == "failed":
            self.error = ServiceError.from_status(event.failed)
        elif kind == "wanted":
            self.is_wanted = True
            if not self._users:
                self.close()


def _ended() -> ServiceError:
    message = "The server has stopped loading models; try again."
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_MANAGER", message, retry_seconds=1)
