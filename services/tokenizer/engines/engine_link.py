"""Connection to one engine: its Session, its model, adapters, load and cache."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import grpc

from services.common.background import keep_running
from services.common.peers.peer import RETRY_SECONDS, Peer, PeerKind, PeerRefusedError, PeerState
from services.tokenizer import metrics
from services.tokenizer.engines.cached_blocks import CachedBlocks, CacheEventError
from services.tokenizer.engines.engine_load import EngineLoad
from services.tokenizer.engines.placement import Need, Placement
from services.tokenizer.engines.shared_count import SharedCount
from tokenwire.errors import ServiceError
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub, EngineServiceStub
from tokenwire.session import engine_session

__all__ = ["ENGINES", "EngineLink", "LinkOwner"]

Answer = TypeVar("Answer")
_LOG = logging.getLogger("engine_link")
_SERVICE = engine_pb2.DESCRIPTOR.services_by_name["EngineService"].full_name
ENGINES = PeerKind("engine", _SERVICE, "engine_health")
_CALL_SECONDS = 10.0
_ADAPTER_SECONDS = 600.0  # for loading the weights of an adapter
_STATUS_SECONDS = 1.0  # a status page asks again soon, and shows an engine without answer as away
_WATCH_SECONDS = 0.1  # between two reports of load
_LEAST_TRUST = 0.5
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)


class LinkOwner(Protocol):
    """The pool that a link belongs to."""

    def admit(self, link: "EngineLink", model: engine_pb2.GetModelResponse) -> None:
        """Accept the engine's model. Raises PeerRefusedError if it is another one."""

    def on_cache_changed(
        self, link: "EngineLink", group: int, stored: Collection[bytes], removed: Collection[bytes]
    ) -> None:
        """Record the hashes of the blocks that an engine has stored and removed."""


class EngineLink:
    """One engine, as long as its address is known."""

    def __init__(self, peer: Peer, owner: LinkOwner) -> None:
        self.peer = peer
        self.target = peer.target
        self.model: engine_pb2.GetModelResponse | None = None
        """Last answer of the engine; None before the first"""
        self.adapters: Mapping[str, str] = {}
        """Fingerprints of the engine's adapters by name, as last reported"""
        self.cached = CachedBlocks(partial(owner.on_cache_changed, self))
        self.num_requests = 0
        """Requests of this process on the engine"""
        self._sequences = SharedCount()
        """Sequences that run or wait"""
        self._tokens = SharedCount()
        """Tokens of prompts that are not computed yet"""
        self._owner = owner
        self._load = engine_pb2.Load()
        self._control = EngineControlServiceStub(peer.channel)
        self._engine = EngineServiceStub(peer.channel)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_followed = False
        self._is_load_followed = False
        self.session = engine_session(peer.channel)
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
        metrics.PLACED.remove(self.target)  # or each former address keeps a series
        await self.session.close()

    @property
    def is_idle(self) -> bool:
        """True if no request of this process is on the engine."""
        return not self.num_requests

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
            return 0  # the engine has not reported its blocks yet
        return max(0.0, tokens - self._load.free_blocks * self.block_size)

    def hashes_of(self, need: Need) -> Sequence[Sequence[bytes]]:
        """Return the hashes of the prompts' blocks; none if the cache is not followed."""
        return need.hashes(self.block_size) if self._is_followed and self.model else ()

    def enter(self, placement: Placement) -> None:
        """Add a request to the engine's load."""
        self.num_requests += 1
        self._sequences.add(placement.sequences)
        self._tokens.add(placement.waiting_tokens)

    def on_admitted(self, promised: int, found: int) -> None:
        """Record how many of the `promised` tokens of a prompt the engine had: `found`."""
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
        """Subtract a request from the engine's load."""
        self.num_requests -= 1
        self._sequences.add(-placement.sequences)

    async def status(self) -> models_pb2.EngineStatus:
        """Return the engine and its load, or the reason why it is away."""
        status = models_pb2.EngineStatus(target=self.target)
        if self.peer.state is PeerState.REFUSED:
            status.state, status.reason = models_pb2.ENGINE_STATE_REFUSED, self.peer.refusal
            return status
        status.state = models_pb2.ENGINE_STATE_AWAY
        if self.model is None or not self.peer.is_serving:  # another engine may be at the address
            return status
        try:
            answer = await self._control.GetLoad(
                engine_pb2.GetLoadRequest(), timeout=_STATUS_SECONDS
            )
        except grpc.aio.AioRpcError:
            return status
        load, model = answer.load, self.model
        status.state = models_pb2.ENGINE_STATE_SERVING
        status.version = model.version
        status.device = model.device
        status.dtype = model.dtype
        status.kernels = model.kernels
        status.running_sequences = load.running_sequences
        status.waiting_sequences = load.waiting_sequences
        status.memory.extend(load.memory)
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

    # the engine's model

    async def ask(self) -> None:
        """Read the engine's model. Raises PeerRefusedError if it can't be used."""
        request = engine_pb2.GetModelRequest()
        try:
            model = await self._control.GetModel(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in _REFUSALS:
                message = f"The engine at {self.target} refuses this service: {error.details()}"
                raise PeerRefusedError(message) from None
            raise
        self._owner.admit(self, model)
        self.model = model
        self.cached.describe(model)
        self.adapters = _fingerprints(model.adapters)

    async def is_loading(self, seconds: float) -> bool:
        """Return whether the engine reports within `seconds` that it loads its model."""
        request = engine_pb2.GetModelRequest()
        try:
            await self._control.GetModel(request, timeout=min(seconds, _CALL_SECONDS))
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
        """Unload an adapter. Requests that use it go on. Raises ServiceError."""
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
        """Open a stream again whenever it ends, unless the engine does not have the rpc."""
        while True:
            try:
                await self.peer.reach()
                await watch()
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    _LOG.warning("the engine at %s: %s", self.target, error.details())
                    return
            except CacheEventError as error:
                _LOG.warning("the cache of the engine at %s is read anew: %s", self.target, error)
                metrics.CACHE_GAPS.inc()
            await asyncio.sleep(RETRY_SECONDS)

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
