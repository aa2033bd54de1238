"""Vectors of prompts from the engines."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from services.common.peers.losses import Losses
from services.common.priority import PRIORITY_KEY, TENANT_KEY
from services.tokenizer.completion.engine_request import CallContext
from services.tokenizer.engines.engine_link import EngineLink
from services.tokenizer.engines.engine_pool import EnginePool
from services.tokenizer.engines.placement import Need
from services.tokenizer.model_limits import ModelLimits
from tokenwire.errors import ServiceError
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["VectorRequest", "Vectors"]

_AT_ONCE = 2  # parts of one request on the engines: one that runs, and the next one


@dataclass(frozen=True, slots=True)
class Vectors:
    """Vectors of prompts, one after the other."""

    width: int
    data: bytes
    """Numbers of all vectors, float32, little endian"""


class VectorRequest:
    """The engines' side of one request."""

    def __init__(self, pool: EnginePool, context: CallContext) -> None:
        self.context = context
        self._pool = pool
        self._free = asyncio.Semaphore(_AT_ONCE)
        self.usage = types_pb2.Usage()
        """Tokens of all parts that engines have computed"""

    async def vectors(
        self,
        prompts: Sequence[engine_pb2.EmbeddedPrompt],
        limits: ModelLimits,
        *,
        is_raw: bool = False,
        keeps_tokens: bool = False,
        weighs_tokens: bool = False,
    ) -> Vectors:
        """Return the vectors of prompts, which go to the engines in parts. Raises ServiceError.

        is_raw: leave out the last stage of the model. keeps_tokens: return the states of all
        tokens. weighs_tokens: return the weights of all tokens.
        """
        self._limits, most = limits, limits.max_sequences
        self._is_raw, self._keeps_tokens, self._weighs_tokens = is_raw, keeps_tokens, weighs_tokens
        firsts = range(0, len(prompts), most)
        try:
            async with asyncio.TaskGroup() as group:
                parts = [
                    group.create_task(self._part(prompts[first : first + most])) for first in firsts
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        answers = [part.result() for part in parts]
        return Vectors(answers[0].width, b"".join(each.vectors for each in answers))

    async def _part(self, prompts: Sequence[engine_pb2.EmbeddedPrompt]) -> engine_pb2.EmbedResponse:
        async with self._free:
            response = await self._ask(prompts)
        usage, own = self.usage, response.usage
        usage.prompt_tokens += own.prompt_tokens
        usage.cached_tokens += own.cached_tokens
        return response

    async def _ask(self, prompts: Sequence[engine_pb2.EmbeddedPrompt]) -> engine_pb2.EmbedResponse:
        """Ask the cheapest engine, and others if an engine was lost, stops or is full."""
        model = self._limits.model if self._limits.adapter else ""
        request = engine_pb2.EmbedRequest(
            model=model,
            prompts=prompts,
            raw=self._is_raw,
            tokens=self._keeps_tokens,
            token_weights=self._weighs_tokens,
        )
        avoided: set[EngineLink] = set()
        losses = Losses()
        while True:
            need = self._need(request)
            placement = self._pool.place(need, avoided)
            try:
                return await placement.link.embed(request, self._metadata(), self._seconds_left())
            except ServiceError as error:
                avoided.add(placement.link)
                is_lost = error.code is grpc.StatusCode.UNAVAILABLE
                is_full = error.reason == "QUEUE_FULL" and self._pool.has_other(avoided, need)
                if not is_full and not (is_lost and losses.count()):
                    raise
                if is_lost:
                    self._pool.suspend(placement.link)
                why = error.message
            finally:
                placement.leave()
            await self._pool.wait_until_serving(self.context.deadline, why, is_new=True)

    def _need(self, request: engine_pb2.EmbedRequest) -> Need:
        """Describe the request for the choice of an engine: the engine computes whole prompts."""
        prompts = [types_pb2.TokenIds(ids=prompt.ids) for prompt in request.prompts]
        generation = engine_pb2.GenerateRequest(
            model=request.model, prompts=prompts, prompt_logprobs=0
        )
        return Need(generation, self.context.tenant, adapter=self._limits.adapter)

    def _metadata(self) -> Sequence[tuple[str, str]]:
        context = self.context
        fields = {
            "x-request-id": context.request_id,
            "traceparent": context.span.traceparent,
            TENANT_KEY: context.tenant,
            PRIORITY_KEY: str(context.priority) if context.priority else "",
        }
        return [(key, value) for key, value in fields.items() if value]

    def _seconds_left(self) -> float | None:
        if self.context.deadline is None:
            return None
        return max(0.0, self.context.deadline - asyncio.get_running_loop().time())
