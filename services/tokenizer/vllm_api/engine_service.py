"""VllmEngine: the service of vLLM that smg and llm-d's endpoint picker call."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineServicer

from services.tokenizer.completion_call import Context
from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.vllm_api.generate_answer import GenerateAnswer
from services.tokenizer.vllm_api.generate_calls import GenerateCalls
from services.tokenizer.vllm_api.generate_request import name_field, to_request
from services.tokenizer.vllm_api.kv_events import kv_event_batches
from services.tokenizer.vllm_api.model_info import ModelInfo, takes_images
from services.tokenizer.vllm_api.pool_load import load_of
from services.tokenizer.vllm_api.tokenizer_bundle import TokenizerBundle, pack_tokenizer
from tokenwire.errors import ServiceError, invalid

__all__ = ["VllmEngine"]

_CORE = "core"
_MOST_FLUSH_SECONDS = 3_600
_POLL_SECONDS = 0.1


class VllmEngine(VllmEngineServicer):
    """The rpcs of VllmEngine. All engines of the pool look like one."""

    def __init__(self, calls: GenerateCalls, pool: EnginePool, model: ModelInfo) -> None:
        self._calls = calls
        self._pool = pool
        self._model = model
        self._started = time.monotonic()
        self._last_request_at = 0.0
        """Unix time of the last request"""
        self._bundle: asyncio.Future[TokenizerBundle] | None = None

    async def Generate(
        self, request: vllm_engine_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[vllm_engine_pb2.GenerateResponse]:
        """Generate, in chunks or as one message for each choice."""
        self._last_request_at = time.time()
        answer = GenerateAnswer(request)
        completion = to_request(request)
        name = partial(name_field, request=request)
        responses = self._calls.run(completion, request.request_id, name, context)
        async with aclosing(responses):
            async for response in responses:
                for message in answer.responses(response):
                    yield message

    async def Embed(
        self, request: vllm_engine_pb2.EmbedRequest, context: Context
    ) -> vllm_engine_pb2.EmbedResponse:
        """Refuse: the models generate."""
        _refuse("Embed: the model generates text")

    async def HealthCheck(
        self, request: vllm_engine_pb2.HealthCheckRequest, context: Context
    ) -> vllm_engine_pb2.HealthCheckResponse:
        """Succeed if new requests are served. Raises UNAVAILABLE if not: smg reads the status."""
        self._calls.require_open()
        if not self._pool.is_serving:
            code = grpc.StatusCode.UNAVAILABLE
            raise ServiceError(code, "NO_ENGINE", "No engine serves at present.", retry_seconds=1)
        return vllm_engine_pb2.HealthCheckResponse(healthy=True)

    async def FlushCache(
        self, request: common_pb2.FlushCacheRequest, context: Context
    ) -> common_pb2.FlushCacheResponse:
        """Empty the prefix caches as soon as no sequence runs."""
        if not 0 <= request.timeout_s <= _MOST_FLUSH_SECONDS:  # NaN is in no range
            message = f"timeout_s must be between 0 and {_MOST_FLUSH_SECONDS}."
            raise invalid("timeout_s", message)
        end = time.monotonic() + request.timeout_s
        while not self._is_idle:
            if time.monotonic() >= end:
                message = f"{load_of(self._pool).running} sequences still run."
                return common_pb2.FlushCacheResponse(success=False, message=message)
            await asyncio.sleep(_POLL_SECONDS)
        blocks = await self._pool.flush_caches()
        return common_pb2.FlushCacheResponse(success=True, message=f"{blocks} blocks were freed.")

    async def StartProfile(
        self, request: common_pb2.StartProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Refuse: the engines have no profiler."""
        _refuse("StartProfile: the engines have no profiler")

    async def StopProfile(
        self, request: common_pb2.StopProfileRequest, context: Context
    ) -> common_pb2.ProfileResponse:
        """Refuse, as `StartProfile`."""
        _refuse("StopProfile: the engines have no profiler")

    async def Abort(
        self, request: vllm_engine_pb2.AbortRequest, context: Context
    ) -> vllm_engine_pb2.AbortResponse:
        """Cancel requests by id."""
        self._calls.abort(request.request_ids)
        return vllm_engine_pb2.AbortResponse()

    async def GetModelInfo(
        self, request: vllm_engine_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetModelInfoResponse:
        """Return the model and its limits."""
        return self._model.message(self._pool)

    async def GetServerInfo(
        self, request: vllm_engine_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_engine_pb2.GetServerInfoResponse:
        """Return the state of the service, and the common properties of its engines."""
        limits = self._pool.limits
        sees = takes_images(limits.capabilities)
        models = [link.model for link in self._pool.serving if link.model is not None]
        return vllm_engine_pb2.GetServerInfoResponse(
            active_requests=self._calls.count,
            is_paused=not self._pool.is_serving,
            last_receive_timestamp=self._last_request_at,
            uptime_seconds=time.monotonic() - self._started,
            server_type="vllm-grpc",  # the protocol's name
            data_parallel_size=1,
            kv_cache_dtype="auto",
            block_size=models[0].block_size if models else 0,
            model_dtype=f"torch.{models[0].dtype}" if models else "",
            max_num_seqs=sum(model.max_running_sequences for model in models),
            mm_processor="inprocess" if sees else "",
            mm_media_ref_schemes="data" if sees else "",
            constrained_decoding_start="first_token",
        )

    async def GetLoads(
        self, request: vllm_engine_pb2.GetLoadsRequest, context: Context
    ) -> vllm_engine_pb2.GetLoadsResponse:
        """Return the load of all engines together, as rank 0."""
        is_meant = request.dp_rank == 0 and (not request.include or _CORE in request.include)
        loads = [load_of(self._pool).to_scheduler_load()] if is_meant else []
        return vllm_engine_pb2.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(),
            version=version("tokenwire"),
            dp_rank_count=1,
            loads=loads,
        )

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Stream the tokenizer's files as a zip archive."""
        has_failed = self._bundle is not None and self._bundle.done() and self._bundle.exception()
        if self._bundle is None or has_failed:
            packing = asyncio.to_thread(pack_tokenizer, self._model.directory)
            self._bundle = asyncio.ensure_future(packing)
        bundle = await asyncio.shield(self._bundle)
        for chunk in bundle.chunks():
            yield chunk

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Context
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Stream the KV blocks that the engines hold, with their token ids, and the load."""
        assert self._pool.blocks is not None, "the pool must keep the blocks' ids"
        batches = kv_event_batches(self._pool, self._pool.blocks, request.start_sequence_number)
        async with aclosing(batches):
            async for batch in batches:
                yield batch

    @property
    def _is_idle(self) -> bool:
        load = load_of(self._pool)
        return not (self._calls.count or load.running or load.waiting)


def _refuse(what: str) -> NoReturn:
    code = grpc.StatusCode.UNIMPLEMENTED
    raise ServiceError(code, "NOT_IMPLEMENTED", f"This server does not implement {what}.")
