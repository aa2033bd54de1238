"""EngineControlService: model, load, abort, drain and cache flush."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from typing import Any, TypeAlias

import grpc

from services.common.bounds import check_bounds
from services.engine.frontend.adapter_registry import Adapter
from services.engine.frontend.frontend import Frontend
from services.engine.frontend.memory_pools import memory_pools
from services.engine.settings import EngineSettings
from tokenwire.errors import invalid
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2 import Capability
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceServicer
from tokenwire.pb.types.v1.types_pb2 import MemoryPool, SamplingParams

__all__ = ["EngineControlServicer"]

_CAPABILITIES = (
    Capability.CAPABILITY_SAMPLING,
    Capability.CAPABILITY_PENALTIES,
    Capability.CAPABILITY_LOGIT_BIAS,
    Capability.CAPABILITY_DRY,
    Capability.CAPABILITY_MIROSTAT,
    Capability.CAPABILITY_STOPPING,
    Capability.CAPABILITY_LOGPROBS,
    Capability.CAPABILITY_PROMPT_LOGPROBS,
    Capability.CAPABILITY_RESUME,
    Capability.CAPABILITY_PREFIX_CACHE,
    Capability.CAPABILITY_TOKEN_LIMITS,
    Capability.CAPABILITY_BEAM_SEARCH,
)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class EngineControlServicer(EngineControlServiceServicer):
    """Servicer that describes the model and the load, and carries out an operator's commands."""

    def __init__(
        self, frontend: Frontend, settings: EngineSettings, set_serving: Callable[[bool], None]
    ) -> None:
        self._frontend = frontend
        self._settings = settings
        self._set_serving = set_serving

    async def GetModel(
        self, request: engine_pb2.GetModelRequest, context: Context
    ) -> engine_pb2.GetModelResponse:
        model, settings = self._frontend.model, self._settings
        grammar = (Capability.CAPABILITY_GRAMMAR,) if settings.grammar else ()
        takes_images = self._frontend.admission.takes_images
        images = (Capability.CAPABILITY_IMAGES,) if takes_images else ()
        return engine_pb2.GetModelResponse(
            model=self._frontend.model_id,
            architecture=model.architecture,
            dtype=model.dtype,
            device=model.device,
            context_length=model.context_length,
            vocabulary_size=model.vocabulary_size,
            eos_token_ids=model.eos_token_ids,
            bos_token_id=model.bos_token_id,
            recommended_sampling=SamplingParams(**asdict(model.recommended)),
            capabilities=(*_CAPABILITIES, *grammar, *images) if model.generates else (),
            max_logprobs=settings.max_logprobs,
            max_sequences_per_request=self._frontend.admission.max_sequences,
            max_running_sequences=model.max_running,
            max_waiting_sequences=settings.max_waiting,
            max_step_tokens=model.max_step_tokens,
            block_size=model.block_size,
            total_blocks=model.total_blocks,
            version=version("tokenwire"),
            weights_fingerprint=model.weights_fingerprint,
            weights=settings.weights,
            kernels=model.kernels,
            model_code=model.model_code,
            adapters=map(_adapter, self._frontend.adapters),
            max_adapters=self._frontend.adapters.most if model.takes_adapters else 0,
            vector_width=model.vector_width,
            token_width=model.token_width,
            vectors_are_scores=model.has_scores,
            vectors_are_normalized=model.vectors_are_normalized,
            takes_pairs=model.takes_pairs,
            hides_ends=model.hides_ends,
            weighs_tokens=model.weighs_tokens,
            only_embeds=not model.generates,
            cache_groups=[engine_pb2.CacheGroup(**each._asdict()) for each in model.cache_groups],
        )

    async def GetLoad(
        self, request: engine_pb2.GetLoadRequest, context: Context
    ) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=self._load())

    async def WatchLoad(
        self, request: engine_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[engine_pb2.WatchLoadResponse]:
        interval = _interval(request, default=0.5)
        while True:
            version = self._frontend.version
            yield engine_pb2.WatchLoadResponse(load=self._load())
            await asyncio.sleep(interval)
            await self._frontend.changed_since(version)

    async def WatchCache(
        self, request: engine_pb2.WatchCacheRequest, context: Context
    ) -> AsyncIterator[engine_pb2.WatchCacheResponse]:
        interval = _interval(request, default=0.05)
        assert self._frontend.model  # raises UNAVAILABLE while it loads
        with self._frontend.cache.watch() as watch:
            for number in itertools.count(1):
                update = await watch.take()
                groups = [
                    engine_pb2.CacheGroupChange(
                        stored=b"".join(change.stored), removed=b"".join(change.removed)
                    )
                    for change in update.groups
                ]
                yield engine_pb2.WatchCacheResponse(
                    number=number, is_whole=update.is_whole, groups=groups
                )
                await asyncio.sleep(interval)

    async def Abort(
        self, request: engine_pb2.AbortRequest, context: Context
    ) -> engine_pb2.AbortResponse:
        if not request.all and not request.request_ids:
            raise invalid("request_ids", "Set request_ids, or set all to abort every request.")
        ids = None if request.all else request.request_ids
        return engine_pb2.AbortResponse(aborted=self._frontend.abort(ids))

    async def Drain(
        self, request: engine_pb2.DrainRequest, context: Context
    ) -> engine_pb2.DrainResponse:
        timeout = request.timeout_seconds if request.HasField("timeout_seconds") else 30.0
        check_bounds(request)
        self._frontend.drain()
        self._set_serving(False)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._frontend.drained(), timeout)
        return engine_pb2.DrainResponse(remaining_requests=self._frontend.num_requests)

    async def LoadAdapter(
        self, request: engine_pb2.LoadAdapterRequest, context: Context
    ) -> engine_pb2.LoadAdapterResponse:
        adapter = await self._frontend.load_adapter(request.name, request.path)
        return engine_pb2.LoadAdapterResponse(adapter=_adapter(adapter))

    async def UnloadAdapter(
        self, request: engine_pb2.UnloadAdapterRequest, context: Context
    ) -> engine_pb2.UnloadAdapterResponse:
        self._frontend.unload_adapter(request.name)
        return engine_pb2.UnloadAdapterResponse()

    async def WatchAdapters(
        self, request: engine_pb2.WatchAdaptersRequest, context: Context
    ) -> AsyncIterator[engine_pb2.WatchAdaptersResponse]:
        assert self._frontend.model  # raises UNAVAILABLE while it loads
        async for adapters in self._frontend.adapters.changes():
            yield engine_pb2.WatchAdaptersResponse(adapters=map(_adapter, adapters))

    async def FlushCache(
        self, request: engine_pb2.FlushCacheRequest, context: Context
    ) -> engine_pb2.FlushCacheResponse:
        return engine_pb2.FlushCacheResponse(freed_blocks=await self._frontend.flush_cache())

    def _memory(self) -> Iterable[MemoryPool]:
        """Return the parts of the memory; none while the model loads."""
        load = self._frontend.load
        if not load.total_blocks:
            return ()
        return memory_pools(self._frontend.model, load.pools, self._frontend.adapters.num_bytes)

    def _load(self) -> engine_pb2.Load:
        load = self._frontend.load
        return engine_pb2.Load(
            running_sequences=load.running,
            waiting_sequences=load.waiting,
            queued_tokens=load.queued_tokens,
            free_blocks=load.free_blocks,
            total_blocks=load.total_blocks,
            tokens_per_second=self._frontend.tokens_per_second,
            draining=self._frontend.draining,
            memory=self._memory(),
        )


def _adapter(adapter: Adapter) -> engine_pb2.Adapter:
    return engine_pb2.Adapter(name=adapter.name, fingerprint=adapter.fingerprint, path=adapter.path)


def _interval(
    request: engine_pb2.WatchLoadRequest | engine_pb2.WatchCacheRequest, default: float
) -> float:
    """Return the seconds between two responses of a watch. Raises INVALID_ARGUMENT."""
    check_bounds(request)
    return request.interval_seconds if request.HasField("interval_seconds") else default
