"""Connection to one engine: its Session, its model, its health, load and cache."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from services.common.background import keep_running
from services.common.peer_health import PeerHealth, Status
from services.tokenizer import metrics
from services.tokenizer.engines.cached_blocks import CachedBlocks, CacheEventError
from services.tokenizer.engines.engine_load import EngineLoad
from services.tokenizer.engines.placement import Need, Placement
from services.tokenizer.engines.shared_count import SharedCount
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub, EngineServiceStub
from tokenwire.serving.health import reports_serving
from tokenwire.session import engine_session
from tokenwire.tls import ClientTls
from tokenwire.token_file import TokenFile, shown

__all__ = ["EngineLink", "EngineRefusedError", "LinkOwner"]

Answer = TypeVar("Answer")
_LOG = logging.getLogger("engine_link")
_SERVICE = "tokenwire.engine.v1.EngineService"
_RETRY_SECONDS = 0.5
_CALL_SECONDS = 10.0
_ADAPTER_SECONDS = 600.0  # that the weights of an adapter may take
_STATUS_SECONDS = 1.0  # a status page asks again soon, and shows an engine without answer as away
_WATCH_SECONDS = 0.1  # between two reports of load
_LEAST_TRUST = 0.5
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class EngineRefusedError(Exception):
    """The engine does not serve this checkpoint as the others do. The message is one sentence."""


class LinkOwner(Protocol):
    """The pool that a link belongs to."""

    def admit(self, link: "EngineLink", model: engine_pb2.GetModelResponse) -> None:
        """Accept the engine's model. Raises EngineRefusedError if it is another one."""

    def on_changed(self, link: "EngineLink") -> None:
        """Note that the engine has begun or ceased to serve, or was refused."""

    def on_idle(self, link: "EngineLink") -> None:
        """Note that no request is left on the engine."""

    def on_cache_changed(
        self, link: "EngineLink", group: int, stored: Collection[bytes], removed: Collection[bytes]
    ) -> None:
        """Note the hashes of blocks that an engine now holds, and of those it holds no longer."""


class EngineLink:
    """One engine, from the first mention of its address to the last."""

    def __init__(
        self,
        target: str,
        owner: LinkOwner,
        lost_seconds: float,
        tls: ClientTls | None = None,
        server_name: str = "",
        token: TokenFile | None = None,
    ) -> None:
        """The last four arguments are those of `connect`."""
        self.target = target
        self.model: engine_pb2.GetModelResponse | None = None
        """Last answer of the engine; None before the first"""
        self.adapters: Mapping[str, str] = {}
        """Fingerprints of the engine's adapters by name, as last reported"""
        self.is_serving = False
        """True if the engine serves this checkpoint, and was not lost since it reported that"""
        self.refusal = ""
        """Why the engine is not used although it answers; empty = it is used"""
        self.cached = CachedBlocks(partial(owner.on_cache_changed, self))
        self.num_requests = 0
        """Requests of this process on the engine"""
        self._sequences = SharedCount()
        """Sequences that run or wait"""
        self._tokens = SharedCount()
        """Tokens of prompts that are not computed yet"""
        self._owner = owner
        self._load = engine_pb2.Load()
        self._channel = connect(target, lost_seconds, tls, server_name, shown(token))
        self._control = EngineControlServiceStub(self._channel)
        self._engine = EngineServiceStub(self._channel)
        self._health = PeerHealth(self._channel, _SERVICE, f"the engine at {target}")
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_followed = False
        self._is_load_followed = False
        self._probe: asyncio.Task[bool] | None = None
        self.session = engine_session(self._channel)

    def start(self) -> None:
        """Follow the engine's health."""
        self._spawn("engine_health", self._watch_health)
        self._spawn("engine_adapters", partial(self._repeat, self._watch_adapters))

    def follow(self) -> None:
        """Follow the engine's load and cache, for the choice of engines and for watchers."""
        self.follow_load()
        if not self._is_followed:
            self._is_followed = True
            self._spawn("engine_cache", partial(self._repeat, self._watch_cache))

    def follow_load(self) -> None:
        """Follow the engine's load."""
        if not self._is_load_followed:
            self._is_load_followed = True
            self._spawn("engine_load", partial(self._repeat, self._watch_load))

    async def close(self) -> None:
        """End the Session; the engine aborts its requests."""
        for task in [*self._tasks]:
            task.cancel()
        if self._probe is not None:
            self._probe.cancel()
        await self.session.close()
        await self._channel.close()

    # the engine's load

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        return self.model.block_size if self.model is not None else 1

    @property
    def load(self) -> EngineLoad:
        """Last report of `follow_load`; nothing runs before the first one."""
        load, model = self._load, self.model
        return EngineLoad(
            running=load.running_sequences,
            waiting=load.waiting_sequences,
            queued_tokens=load.queued_tokens,
            places=model.max_running_sequences if model is not None else 0,
            used_blocks=load.total_blocks - load.free_blocks,
            total_blocks=load.total_blocks,
            block_size=self.block_size,
            tokens_per_second=load.tokens_per_second,
        )

    @property
    def sequences(self) -> int:
        """Running and waiting sequences."""
        return self._sequences.total

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens that the engine must compute before those of a new request."""
        return self._tokens.total

    def missing_tokens(self, need: Need) -> float:
        """Return the prompt tokens of a request that the engine would have to compute.

        Cached blocks count less if the engine lacked blocks that it had reported.
        """
        held = self.block_size * sum(map(self.cached.prefix, self.hashes_of(need)))
        return need.tokens - self.cached.trust * held

    def lacking_tokens(self, tokens: float) -> float:
        """Return how many of these tokens have no free block."""
        if not self._load.total_blocks:
            return 0  # not reported yet
        return max(0.0, tokens - self._load.free_blocks * self.block_size)

    def hashes_of(self, need: Need) -> Sequence[Sequence[bytes]]:
        """Return the hashes of the prompts' blocks; none if the cache is not followed."""
        return need.hashes(self.block_size) if self._is_followed and self.model else ()

    def enter(self, placement: Placement) -> None:
        """Count a request as the engine's."""
        self.num_requests += 1
        self._sequences.add(placement.sequences)
        self._tokens.add(placement.waiting_tokens)

    def on_admitted(self, promised: int, found: int) -> None:
        """Note the prompt tokens that the engine had, of those that it had reported."""
        trust = self.cached.trust
        self.cached.on_admitted(promised, found)
        metrics.LACKING_TOKENS.inc(max(0, promised - found))
        if self.cached.trust < _LEAST_TRUST <= trust:
            _LOG.warning(
                "the engine at %s has fewer than half of the cached tokens that it reports",
                self.target,
            )

    def on_computed(self, tokens: int) -> None:
        """Subtract prompt tokens that the engine has computed."""
        self._tokens.add(-tokens)

    def leave(self, placement: Placement) -> None:
        """Count one request less."""
        self.num_requests -= 1
        self._sequences.add(-placement.sequences)
        if not self.num_requests:
            self._owner.on_idle(self)

    async def status(self) -> completion_pb2.EngineStatus:
        """Return the engine and its load, or why it is away."""
        status = completion_pb2.EngineStatus(target=self.target)
        if self.refusal:
            status.state, status.reason = completion_pb2.ENGINE_STATE_REFUSED, self.refusal
            return status
        status.state = completion_pb2.ENGINE_STATE_AWAY
        if self.model is None or not self.is_serving:  # another checkpoint may be at its address
            return status
        try:
            answer = await self._control.GetLoad(
                engine_pb2.GetLoadRequest(), timeout=_STATUS_SECONDS
            )
        except grpc.aio.AioRpcError:
            return status
        load, model = answer.load, self.model
        status.state = completion_pb2.ENGINE_STATE_SERVING
        status.version = model.version
        status.device = model.device
        status.dtype = model.dtype
        status.kernels = model.kernels
        status.running_sequences = load.running_sequences
        status.waiting_sequences = load.waiting_sequences
        status.total_blocks = load.total_blocks
        status.used_blocks = load.total_blocks - load.free_blocks
        status.draining = load.draining
        status.block_size = model.block_size
        return status

    async def embed(
        self,
        request: engine_pb2.EmbedRequest,
        metadata: Sequence[tuple[str, str]],
        seconds: float | None,
    ) -> engine_pb2.EmbedResponse:
        """Return the vectors of prompts. Raises ServiceError."""
        return await self._ask(self._engine.Embed(request, metadata=metadata, timeout=seconds))

    async def flush_cache(self) -> int:
        """Evict the cached prefixes that no running sequence holds; return the number of blocks.

        Raises UNAVAILABLE if the engine does not answer.
        """
        try:
            answer = await self._control.FlushCache(
                engine_pb2.FlushCacheRequest(), timeout=_CALL_SECONDS
            )
        except grpc.aio.AioRpcError as error:
            raise ServiceError.from_rpc_error(error) from None
        return answer.freed_blocks

    # the engine's health

    def suspend(self, seconds: float) -> None:
        """Stop using the engine until it reports again that it serves.

        It is probed until then. seconds: length of each probe, without the time of loading a model.
        """
        if self.is_serving:
            self._change(is_serving=False)
            self._spawn("engine_regain", partial(self._regain, seconds))

    def probe(self, seconds: float) -> "asyncio.Task[bool]":
        """Return a task, shared by all callers, that returns true if the engine serves in time.

        The time in which the engine loads its model does not count.
        """
        if self._probe is None or self._probe.done():
            self._probe = asyncio.ensure_future(self._probe_health(seconds))
        return self._probe

    async def _regain(self, seconds: float) -> None:
        while not self.is_serving:
            await self.probe(seconds)
            await asyncio.sleep(_RETRY_SECONDS)

    async def _watch_health(self) -> None:
        while True:
            try:
                async with aclosing(self._health.statuses()) as statuses:
                    async for status in statuses:
                        if status == Status.SERVICE_UNKNOWN:
                            raise EngineRefusedError(f"The server at {self.target} is no engine.")
                        serves = status == Status.SERVING
                        if serves:
                            await self._read_model()
                        self._change(serves)
            except EngineRefusedError as error:
                self._refuse(str(error))
            except grpc.aio.AioRpcError as error:
                self._health.log_loss(error)
            self._change(is_serving=False)  # another engine may come back at the address
            await asyncio.sleep(_RETRY_SECONDS)

    async def _read_model(self) -> None:
        request = engine_pb2.GetModelRequest()
        try:
            model = await self._control.GetModel(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                message = f"The engine at {self.target} refuses this service: {error.details()}"
                raise EngineRefusedError(message) from None
            raise
        self._owner.admit(self, model)
        self.model = model
        self.cached.describe(model)
        self.adapters = _fingerprints(model.adapters)
        self.refusal = ""

    def _refuse(self, why: str) -> None:
        if why != self.refusal:
            _LOG.error("%s", why)
            self.refusal = why
            self._owner.on_changed(self)

    def _change(self, is_serving: bool) -> None:
        if is_serving != self.is_serving:
            self.is_serving = is_serving
            self._owner.on_changed(self)

    async def _probe_health(self, seconds: float) -> bool:
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while (left := end - loop.time()) > 0:
            if await self._serves(min(left, _CALL_SECONDS)):
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
        except (EngineRefusedError, grpc.aio.AioRpcError):  # `_watch_health` logs it
            return False
        self._change(is_serving=True)
        return True

    async def _loads(self) -> bool:
        try:
            await self._control.GetModel(engine_pb2.GetModelRequest(), timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            return ServiceError.from_rpc_error(error).reason == "LOADING"
        return False

    # the engine's adapters

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter from a directory of the engine's machine. Raises ServiceError."""
        request = engine_pb2.LoadAdapterRequest(name=name, path=path)
        adapter = (
            await self._ask(self._control.LoadAdapter(request, timeout=_ADAPTER_SECONDS))
        ).adapter
        self.adapters = {**self.adapters, adapter.name: adapter.fingerprint}

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; its requests go on. Raises ServiceError."""
        request = engine_pb2.UnloadAdapterRequest(name=name)
        await self._ask(self._control.UnloadAdapter(request, timeout=_CALL_SECONDS))
        self.adapters = {each: of for each, of in self.adapters.items() if each != name}

    async def _ask(self, call: Awaitable[Answer]) -> Answer:
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise ServiceError.from_rpc_error(error) from None

    # the engine's load, cache and adapters

    async def _repeat(self, watch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Watch again whenever the stream ends, unless the engine does not know the rpc."""
        while True:
            try:
                await self._health.reach()
                await watch()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    _LOG.warning("the engine at %s: %s", self.target, error.details())
                    return
            except CacheEventError as error:
                _LOG.warning("the cache of the engine at %s is read anew: %s", self.target, error)
                metrics.CACHE_GAPS.inc()
            await asyncio.sleep(_RETRY_SECONDS)

    async def _watch_load(self) -> None:
        request = engine_pb2.WatchLoadRequest(interval_seconds=_WATCH_SECONDS)
        try:
            async for answer in self._control.WatchLoad(request):
                self._take(answer.load)
        finally:
            self._take(engine_pb2.Load())

    def _take(self, load: engine_pb2.Load) -> None:
        """Take a report of the engine's load."""
        self._load = load
        self._sequences.report(load.running_sequences + load.waiting_sequences)
        self._tokens.report(load.queued_tokens)

    async def _watch_adapters(self) -> None:
        async for answer in self._control.WatchAdapters(engine_pb2.WatchAdaptersRequest()):
            self.adapters = _fingerprints(answer.adapters)

    async def _watch_cache(self) -> None:
        request = engine_pb2.WatchCacheRequest()
        try:
            async for update in self._control.WatchCache(request):
                self.cached.apply(update)
        finally:
            self.cached.forget()

    def _spawn(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        task = keep_running(name, work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _fingerprints(adapters: Iterable[engine_pb2.Adapter]) -> Mapping[str, str]:
    return {adapter.name: adapter.fingerprint for adapter in adapters}
