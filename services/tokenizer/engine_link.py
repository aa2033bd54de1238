"""Connection to the engine: its Session, its model and limits, its health."""

import asyncio
import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.common.contract import MAX_CHAT_LOGPROBS
from services.common.settings import StartupError
from services.tokenizer.model_limits import ModelLimits
from services.tokenizer.text.vocabulary import Vocabulary
from tokenwire.channel import LOST_SECONDS, connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub
from tokenwire.serving.health import reports_serving
from tokenwire.session import engine_session

__all__ = ["EngineLink", "LinkSettings"]

_LOG = logging.getLogger("engine_link")
_SERVICE = "tokenwire.engine.v1.EngineService"
_RETRY_SECONDS = 0.5
_CALL_SECONDS = 10.0
_LOAD_SECONDS = 1.0  # a status page asks again soon, and shows an engine without answer as away
_SERVING = health_pb2.HealthCheckResponse.SERVING


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """Address of the engine, and this service's own limits."""

    target: str
    model: str
    max_logprobs: int
    max_stop_strings: int
    appends_suffix: bool
    wait_seconds: float
    """Seconds that requests wait for an engine that stops or was lost; its loading is excluded."""
    lost_seconds: float = LOST_SECONDS
    """Seconds of silence after which the engine is lost"""
    max_waiting: int = 1024
    """New requests that may wait for the engine"""


class EngineLink:
    """Connection to one engine for the life of the process."""

    def __init__(
        self, settings: LinkSettings, vocabulary: Vocabulary, on_serving: Callable[[bool], None]
    ) -> None:
        """`on_serving` is called when the engine starts or stops serving."""
        self._settings = settings
        self._vocabulary = vocabulary
        self._on_serving = on_serving
        self._channel = connect(settings.target, settings.lost_seconds)
        self._control = EngineControlServiceStub(self._channel)
        self._health = health_pb2_grpc.HealthStub(self._channel)
        self._limits: ModelLimits | None = None
        self._model: engine_pb2.GetModelResponse | None = None
        self._is_verified = False
        self._watching: asyncio.Task[None] | None = None
        self._probe: asyncio.Task[bool] | None = None
        self._waiting = 0
        """New requests that wait for the engine"""
        self.session = engine_session(self._channel)

    @property
    def limits(self) -> ModelLimits:
        """Limits of requests. Raises UNAVAILABLE until the engine has answered once."""
        if self._limits is None:
            raise ServiceError(
                grpc.StatusCode.UNAVAILABLE,
                "ENGINE_UNREACHABLE",
                "The engine is not reachable yet.",
                retry_seconds=1,
            )
        return self._limits

    @property
    def is_known(self) -> bool:
        """True if the engine has answered once."""
        return self._limits is not None

    @property
    def is_verified(self) -> bool:
        """True if the engine serves this checkpoint, and was not lost since it said so."""
        return self._is_verified

    @property
    def context_length(self) -> int:
        """Tokens: the engine's context length, or the checkpoint's while it is unknown."""
        return self._limits.context_length if self._limits else self._vocabulary.context_length

    async def start(self) -> None:
        """Wait until the engine serves. Raises StartupError if it serves another checkpoint."""
        serves: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._watching = asyncio.ensure_future(self._watch(serves))
        await serves

    async def wait_until_serving(self, deadline: float | None, why: str, *, is_new: bool) -> None:
        """Wait for an engine that stops, was lost, or has not been reached.

        deadline: loop time; None without a deadline. why: the reason that it doesn't serve.
        is_new: whether the request was never admitted. Only new requests are limited in number.
        Raises RESOURCE_EXHAUSTED if too many wait, DEADLINE_EXCEEDED, and UNAVAILABLE if the engine
        does not serve within `wait_seconds`; the time in which it loads its model does not count.
        """
        if is_new and self._waiting >= self._settings.max_waiting:
            message = f"{self._waiting} requests already wait for the engine; try again."
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            raise ServiceError(code, "QUEUE_FULL", message, retry_seconds=1)
        self._waiting += is_new
        try:
            async with asyncio.timeout_at(deadline):
                serves = await self._serves_again()
        except TimeoutError:
            message = "The deadline passed while the engine was unavailable."
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise ServiceError(code, "DEADLINE_EXCEEDED", message) from None
        finally:
            self._waiting -= is_new
        if not serves:
            message = f"The engine is unreachable or does not serve: {why}"
            code = grpc.StatusCode.UNAVAILABLE
            raise ServiceError(code, "ENGINE_LOST", message, retry_seconds=1)

    async def engine_status(self) -> completion_pb2.EngineStatus | None:
        """Return the engine and its current load; None if it does not answer in time."""
        try:
            answer = await self._control.GetLoad(engine_pb2.GetLoadRequest(), timeout=_LOAD_SECONDS)
        except grpc.aio.AioRpcError:
            return None
        if self._model is None or not self._is_verified:  # another checkpoint may be at its address
            return None
        load = answer.load
        return completion_pb2.EngineStatus(
            version=self._model.version,
            device=self._model.device,
            dtype=self._model.dtype,
            kernels=self._model.kernels,
            running_sequences=load.running_sequences,
            waiting_sequences=load.waiting_sequences,
            total_blocks=load.total_blocks,
            used_blocks=load.total_blocks - load.free_blocks,
            draining=load.draining,
        )

    async def close(self) -> None:
        """End the Session; the engine aborts its requests."""
        if self._watching is not None:
            self._watching.cancel()
        await self.session.close()
        await self._channel.close()

    async def _watch(self, serves: "asyncio.Future[None]") -> None:
        is_loss_logged = False
        logged_error = ""
        while True:
            try:
                request = health_pb2.HealthCheckRequest(service=_SERVICE)
                async for answer in self._health.Watch(request, wait_for_ready=True):
                    serving = answer.status == _SERVING
                    if serving:
                        await self._read_model()
                    self._on_serving(serving)
                    if serving and not serves.done():
                        serves.set_result(None)
                    is_loss_logged, logged_error = False, ""
            except StartupError as error:
                if not serves.done():
                    serves.set_exception(error)
                    return
                if str(error) != logged_error:
                    _LOG.error("%s", error)
                    logged_error = str(error)
            except grpc.aio.AioRpcError as error:
                if not is_loss_logged:
                    _LOG.warning(
                        "the engine at %s is not reachable: %s",
                        self._settings.target,
                        error.details(),
                    )
                    is_loss_logged = True
            self._is_verified = False  # whichever engine comes back must say what it serves
            self._on_serving(False)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _read_model(self) -> None:
        model = await self._control.GetModel(engine_pb2.GetModelRequest(), timeout=_CALL_SECONDS)
        expected = self._vocabulary.model_vocabulary_size
        if expected and model.vocabulary_size != expected:
            raise StartupError(
                f"The engine at {self._settings.target} serves another checkpoint: its vocabulary "
                f"has {model.vocabulary_size:,} ids, this one's {expected:,}."
            )
        self._model = model
        self._limits = self._make_limits(model)
        self._is_verified = True

    def _make_limits(self, model: engine_pb2.GetModelResponse) -> ModelLimits:
        identity = "\n".join(
            (
                model.model,
                model.architecture,
                model.dtype,
                model.version,
                model.weights_fingerprint,
                self._vocabulary.fingerprint,
                self._vocabulary.configuration_hash,
            )
        )
        return ModelLimits(
            model=self._settings.model,
            system_fingerprint=f"fp_{hashlib.sha256(identity.encode()).hexdigest()[:12]}",
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            eos_ids=frozenset(model.eos_token_ids),
            capabilities=frozenset(model.capabilities),
            max_logprobs=min(self._settings.max_logprobs, model.max_logprobs),
            max_chat_logprobs=min(MAX_CHAT_LOGPROBS, model.max_logprobs),
            max_sequences=model.max_sequences_per_request,
            max_stop_strings=self._settings.max_stop_strings,
            appends_suffix=self._settings.appends_suffix,
        )

    async def _serves_again(self) -> bool:
        """Return whether the engine serves in time. All waiting requests share one probe."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._probe_health(self._settings.wait_seconds))
        return await asyncio.shield(self._probe)

    async def _probe_health(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            if await self._serves(left):
                return True
            if await self._loads():
                end = loop.time() + seconds
            await asyncio.sleep(min(_RETRY_SECONDS, max(0.0, end - loop.time())))
        return False

    async def _serves(self, seconds: float) -> bool:
        if not await reports_serving(self._channel, _SERVICE, seconds, wait_for_ready=True):
            return False
        try:
            await self._read_model()
        except (StartupError, grpc.aio.AioRpcError):  # `_watch` logs it
            return False
        return True

    async def _loads(self) -> bool:
        try:
            await self._control.GetModel(engine_pb2.GetModelRequest(), timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            return ServiceError.from_rpc_error(error).reason == "LOADING"
        return False
