"""Server whose models are loaded on demand, as the chat uses it."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc

from tokenwire.channel import connect
from tokenwire.cli.chat.chat_server import ChatServer, ModelError, not_offered
from tokenwire.cli.other_service import explain
from tokenwire.client import Client
from tokenwire.errors import ServiceError
from tokenwire.pb.models.v1 import model_manager_pb2
from tokenwire.pb.models.v1.model_manager_pb2_grpc import ModelManagerServiceStub

__all__ = ["DemandServer"]

_CALL_SECONDS = 10.0
_CATALOG_SECONDS = 15.0
"""Longest wait for a model that was just added to the server's catalog"""


class DemandServer(ChatServer):
    """Models of one server, each in memory while it answers and some time after."""

    def __init__(self, manager: str, url: str) -> None:
        """manager: host:port of the models' manager. url: the server's name in messages."""
        self._url = url
        self._manager = manager
        self._channel = connect(manager)
        self._stub = ModelManagerServiceStub(self._channel)
        self._clients: dict[str, Client] = {}
        """Clients by target"""
        self._last = manager

    async def aclose(self) -> None:
        """Disconnect."""
        for client in self._clients.values():
            await client.aclose()
        await self._channel.close()

    async def models(self) -> Sequence[str]:
        return [model.name for model in await self._list()]

    async def find(self, name: str) -> str:
        known = await self._list()
        for model in known:
            if name in (model.name, *model.aliases):
                return model.name
        raise ModelError(not_offered(name, [model.name for model in known], self._url))

    async def until_known(self, name: str) -> None:
        """Wait for a model that was added to the catalog a moment ago. Raises ModelError."""
        request = model_manager_pb2.WatchModelsRequest()
        try:
            async with asyncio.timeout(_CATALOG_SECONDS):
                async for change in self._stub.WatchModels(request):
                    if any(name in (each.name, *each.aliases) for each in change.models):
                        return
        except grpc.aio.AioRpcError as failure:
            raise ServiceError.from_rpc_error(failure) from None
        except TimeoutError:
            pass
        raise ModelError(f"{self._url} did not take {name}; its log says why.")

    @asynccontextmanager
    async def lease(self, model: str, show: Callable[[str], None]) -> AsyncIterator[Client]:
        use = self._stub.UseModel()
        try:
            await use.write(model_manager_pb2.UseModelRequest(model=model))
            while (event := await use.read()) is not grpc.aio.EOF:
                assert isinstance(event, model_manager_pb2.UseModelResponse)
                match event.WhichOneof("event"):
                    case "queued":
                        show(f"{model} waits for memory …")
                    case "loading":
                        show(_progress(model, event.loading))
                    case "ready":
                        break
                    case "failed":
                        raise ServiceError.from_status(event.failed)
            else:
                raise ModelError(f"{self._url} ended while it loaded {model}.")
            yield self._client(await self._target(model))
        except grpc.aio.AioRpcError as failure:
            raise ServiceError.from_rpc_error(failure) from None
        finally:
            use.cancel()

    async def why_failed(self, error: ServiceError) -> str:
        return await asyncio.create_task(explain(self._last, error, None))

    async def _list(self) -> Sequence[model_manager_pb2.Model]:
        request = model_manager_pb2.ListModelsRequest(rescan=True)
        try:
            return (await self._stub.ListModels(request, timeout=_CALL_SECONDS)).models
        except grpc.aio.AioRpcError as failure:
            self._last = self._manager
            raise ServiceError.from_rpc_error(failure) from None

    async def _target(self, name: str) -> str:
        for model in await self._list():
            if name in (model.name, *model.aliases):
                return model.target
        raise ModelError(f"{self._url} no longer has {name}.")

    def _client(self, target: str) -> Client:
        self._last = target
        if target not in self._clients:
            self._clients[target] = Client(target)
        return self._clients[target]


def _progress(model: str, loading: model_manager_pb2.Loading) -> str:
    share = f" {loading.progress:.0%}" if loading.HasField("progress") else ""
    return f"loading {model}{share} …"
