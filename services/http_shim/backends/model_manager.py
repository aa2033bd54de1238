"""Client of the manager of the models on demand: their states, and requests to load and unload."""

import math
from collections.abc import AsyncGenerator, AsyncIterator

import grpc

from services.common.background import keep_running
from services.common.logging import request_id
from services.common.peers.targets import parse_targets
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.models.v1 import model_manager_pb2 as pb
from tokenwire.pb.models.v1.model_manager_pb2_grpc import ModelManagerServiceStub
from tokenwire.token_file import TokenFile, shown

__all__ = ["ModelManagerClient", "manager_error", "manager_of", "on_wire"]

_SCAN_SECONDS = 10.0
_LOST = frozenset({"UNREACHABLE", "UNKNOWN"})


class ModelManagerClient:
    """The manager, by its address. Create it on the event loop that uses it."""

    def __init__(self, target: str, token: TokenFile | None) -> None:
        self._channel = connect(target, token=shown(token))
        self._stub = ModelManagerServiceStub(self._channel)
        self._states: dict[str, pb.Model] = {}
        self._is_connected = False
        self._watching = keep_running("model_manager", self._watch)

    @property
    def is_connected(self) -> bool:
        """True if the manager answers: models can be loaded."""
        return self._is_connected

    def state(self, name: str) -> pb.Model | None:
        """Return the last known state of a model by its full name; None if there is none."""
        return self._states.get(name)

    def use(
        self, requests: AsyncIterator[pb.UseModelRequest]
    ) -> "grpc.aio.StreamStreamCall[pb.UseModelRequest, pb.UseModelResponse]":
        """Open a stream that keeps a model in memory."""
        return self._stub.UseModel(requests)

    async def rescan(self) -> bool:
        """Let the manager look for new models; return whether the catalog has others than before.

        Without an answer it has the same.
        """
        request = pb.ListModelsRequest(rescan=True)
        try:
            return (await self._stub.ListModels(request, timeout=_SCAN_SECONDS)).has_changed
        except grpc.aio.AioRpcError:
            return False

    async def load(self, name: str, keep_alive: float | None) -> pb.Model:
        """Load a model, and return its state. Raises ServiceError."""
        request = pb.LoadModelRequest(model=name, keep_alive_seconds=on_wire(keep_alive))
        try:
            return self._note((await self._stub.LoadModel(request, metadata=_metadata())).model)
        except grpc.aio.AioRpcError as error:
            raise manager_error(error) from None

    async def unload(self, name: str, *, force: bool) -> pb.Model:
        """Unload a model, and return its state. Raises ServiceError."""
        request = pb.UnloadModelRequest(model=name, force=force)
        try:
            return self._note((await self._stub.UnloadModel(request, metadata=_metadata())).model)
        except grpc.aio.AioRpcError as error:
            raise manager_error(error) from None

    async def pull(self, name: str) -> AsyncGenerator[pb.PullModelResponse, None]:
        """Download a model; yield the progress. Raises ServiceError."""
        call = self._stub.PullModel(pb.PullModelRequest(model=name), metadata=_metadata())
        try:
            async for progress in call:
                yield progress
        except grpc.aio.AioRpcError as error:
            raise manager_error(error) from None
        finally:
            call.cancel()

    async def remove(self, name: str) -> None:
        """Unload a model, and remove its files. Raises ServiceError."""
        request = pb.RemoveModelRequest(model=name)
        try:
            await self._stub.RemoveModel(request, metadata=_metadata())
        except grpc.aio.AioRpcError as error:
            raise manager_error(error) from None

    async def close(self) -> None:
        self._watching.cancel()
        await self._channel.close()

    def _note(self, model: pb.Model) -> pb.Model:
        self._states[model.name] = model
        return model

    async def _watch(self) -> None:
        """Follow the states of all models."""
        call = self._stub.WatchModels(pb.WatchModelsRequest(), wait_for_ready=True)
        try:
            async for changes in call:
                self._is_connected = True
                for model in changes.models:
                    self._note(model)
                for name in changes.removed:
                    self._states.pop(name, None)
        finally:
            self._is_connected = False
        raise ConnectionError("the manager has ended the stream of states")


def manager_of(target: str, token: TokenFile | None) -> ModelManagerClient | None:
    """Return the client of --model-manager; None without one. Raises StartupError."""
    if not target:
        return None
    parse_targets(target, "--model-manager")
    return ModelManagerClient(target, token)


def on_wire(keep_alive: float | None) -> float | None:
    """Return the seconds as the contract has them: negative = for ever."""
    return -1.0 if keep_alive == math.inf else keep_alive


def manager_error(error: grpc.aio.AioRpcError) -> ServiceError:
    """Return the error of a call as clients see it."""
    made = ServiceError.from_rpc_error(error)
    if made.reason not in _LOST and made.code is not grpc.StatusCode.UNAUTHENTICATED:
        return made
    message = "The server can't load models now; try again."
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "NO_MANAGER", message, retry_seconds=1)


def _metadata() -> tuple[tuple[str, str], ...]:
    return (("x-request-id", request_id.get()),) if request_id.get() else ()
