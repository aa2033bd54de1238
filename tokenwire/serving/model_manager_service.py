"""gRPC service of the models that are loaded on demand, on loopback."""

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Any

import grpc

from services.common.accounts.authenticator import Authenticator
from services.common.bounds import check_bounds
from services.common.interceptor import RpcInterceptor
from services.common.network.addresses import METRICS_PORT_OFFSET, why_unusable
from services.common.server import SERVER_OPTIONS
from services.common.settings import StartupError
from services.common.telemetry import serve_metrics
from tokenwire.errors import invalid
from tokenwire.pb.models.v1 import model_manager_pb2 as pb
from tokenwire.pb.models.v1.model_manager_pb2_grpc import (
    ModelManagerServiceServicer,
    add_ModelManagerServiceServicer_to_server,
)
from tokenwire.serving.cached_models import CachedModels
from tokenwire.serving.model_manager import ModelManager
from tokenwire.serving.serve_options import ServeError
from tokenwire.token_file import TokenFile

__all__ = ["ModelManagerServicer", "serve_manager"]

_HOST = "127.0.0.1"


async def serve_manager(
    servicer: "ModelManagerServicer", port: int, token_file: Path | None
) -> grpc.aio.Server:
    """Serve the manager on loopback, for callers with the token, and its metrics.

    Raises ServeError.
    """
    token = None if token_file is None else TokenFile(token_file)
    interceptor = RpcInterceptor(Authenticator(None, token))
    server = grpc.aio.server(options=SERVER_OPTIONS, interceptors=[interceptor])
    add_ModelManagerServiceServicer_to_server(servicer, server)
    try:
        server.add_insecure_port(f"{_HOST}:{port}")
        serve_metrics(_HOST, port + METRICS_PORT_OFFSET)
    except RuntimeError:  # gRPC's error doesn't say why
        why = why_unusable(_HOST, port) or "gRPC gives no reason"
        raise ServeError(f"Can't use the manager port {_HOST}:{port}: {why}.") from None
    except StartupError as error:
        raise ServeError(str(error)) from None
    await server.start()
    return server


class ModelManagerServicer(ModelManagerServiceServicer):
    """The rpcs, which ask the manager."""

    def __init__(
        self, manager: ModelManager, rescan: Callable[[], Awaitable[bool]], cache: CachedModels
    ) -> None:
        """rescan: looks for new models, and returns whether there are other models than before."""
        self._manager = manager
        self._rescan = rescan
        self._cache = cache

    async def end_work(self) -> None:
        """End loads and downloads, and refuse further ones. Loaded models stay usable."""
        self._cache.pulls.close()
        await self._manager.close()

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        has_changed = request.rescan and await self._rescan()
        return pb.ListModelsResponse(models=self._manager.states(), has_changed=has_changed)

    async def WatchModels(
        self, request: pb.WatchModelsRequest, context: Any
    ) -> AsyncIterator[pb.WatchModelsResponse]:
        watch = self._manager.watch()
        try:
            while True:
                response = pb.WatchModelsResponse()
                for name in await watch.take():
                    state = self._manager.state(name)
                    if state is None:
                        response.removed.append(name)
                    else:
                        response.models.append(state)
                yield response
        finally:
            self._manager.end_watch(watch)

    async def UseModel(
        self, requests: AsyncIterator[pb.UseModelRequest], context: Any
    ) -> AsyncIterator[pb.UseModelResponse]:
        first = await anext(requests, None)
        if first is None:
            raise invalid("model", "The stream's first message must name a model.")
        check_bounds(first)
        lease = await self._manager.use(first.model, _keep_alive(first))

        async def read() -> None:
            async for request in requests:
                self._manager.keep(lease, _keep_alive(request))

        reading = asyncio.create_task(read())
        try:
            while not lease.has_failed or not lease.events.empty():
                event = asyncio.ensure_future(lease.events.get())
                try:
                    await asyncio.wait([event, reading], return_when=asyncio.FIRST_COMPLETED)
                    if not event.done():  # the client has ended its side
                        reading.result()
                        return
                finally:
                    event.cancel()
                yield event.result()
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(reading, return_exceptions=True)
            self._manager.release(lease)

    async def LoadModel(self, request: pb.LoadModelRequest, context: Any) -> pb.LoadModelResponse:
        check_bounds(request)
        model = await self._manager.load(request.model, _keep_alive(request))
        return pb.LoadModelResponse(model=model)

    async def UnloadModel(
        self, request: pb.UnloadModelRequest, context: Any
    ) -> pb.UnloadModelResponse:
        check_bounds(request)
        model = await self._manager.unload(request.model, force=request.force)
        return pb.UnloadModelResponse(model=model)

    async def PullModel(
        self, request: pb.PullModelRequest, context: Any
    ) -> AsyncIterator[pb.PullModelResponse]:
        check_bounds(request)
        self._cache.require()
        async with aclosing(self._cache.pulls.pull(request.model)) as progress:
            async for each in progress:
                if each.path:
                    name = await self._cache.name_of(each.path)
                    yield pb.PullModelResponse(name=name)
                else:
                    yield pb.PullModelResponse(
                        completed_bytes=each.completed, total_bytes=each.total
                    )

    async def RemoveModel(
        self, request: pb.RemoveModelRequest, context: Any
    ) -> pb.RemoveModelResponse:
        check_bounds(request)
        self._cache.require()
        name = await self._cache.disk_name_of(request.model)
        await self._manager.unload(request.model, force=False)
        await self._cache.pulls.remove(name)
        await self._cache.look_again()
        return pb.RemoveModelResponse()


def _keep_alive(request: pb.UseModelRequest | pb.LoadModelRequest) -> float | None:
    """Return the seconds of a request; None = it states none. Raises INVALID_ARGUMENT."""
    if not request.HasField("keep_alive_seconds"):
        return None
    seconds = request.keep_alive_seconds
    if math.isnan(seconds):
        raise invalid("keep_alive_seconds", "keep_alive_seconds must be a number of seconds.")
    return math.inf if seconds < 0 else seconds
