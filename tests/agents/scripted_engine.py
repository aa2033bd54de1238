"""An engine that speaks EngineService, and whose tokens a script decides."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from tokenizers import Tokenizer

from tests.agents.scripted_model import CONTEXT
from tokenwire.channel_options import MESSAGE_LIMITS
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import (
    EngineControlServiceServicer,
    EngineServiceServicer,
    add_EngineControlServiceServicer_to_server,
    add_EngineServiceServicer_to_server,
)
from tokenwire.pb.types.v1 import types_pb2

__all__ = ["ScriptedEngine", "running_engine"]

_PIECE = 7
"""Tokens of a delta"""
_BLOCKS = 16_384


class ScriptedEngine(EngineServiceServicer, EngineControlServiceServicer):
    """Answers each prompt of a Session with the text that a script returns for it."""

    def __init__(self, model: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._turn: Callable[[str], str] = lambda _: ""

    def follow(self, turn: Callable[[str], str]) -> None:
        """Answer with the texts that `turn` returns for the texts of prompts."""
        self._turn = turn

    async def GetModel(self, request: Any, context: Any) -> engine_pb2.GetModelResponse:
        return engine_pb2.GetModelResponse(
            model="scripted",
            architecture="Scripted",
            dtype="float32",
            device="cpu",
            context_length=CONTEXT,
            vocabulary_size=self._tokenizer.get_vocab_size(),
            capabilities=[number for number in engine_pb2.Capability.values() if number],
            max_logprobs=20,
            max_sequences_per_request=128,
            max_running_sequences=32,
            block_size=32,
            total_blocks=_BLOCKS,
        )

    async def WatchAdapters(
        self, request: Any, context: Any
    ) -> AsyncIterator[engine_pb2.WatchAdaptersResponse]:
        yield engine_pb2.WatchAdaptersResponse()
        await asyncio.get_running_loop().create_future()

    async def Session(
        self, requests: AsyncIterator[engine_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[engine_pb2.SessionResponse]:
        await context.send_initial_metadata(())
        async for request in requests:
            for command in request.commands:
                if command.HasField("start"):
                    yield self._answer(command)

    def _answer(self, command: engine_pb2.SessionCommand) -> engine_pb2.SessionResponse:
        request, response = command.start.request, engine_pb2.SessionResponse()
        prompt = self._tokenizer.decode(request.prompts[0].ids, skip_special_tokens=False)
        ids = self._tokenizer.encode(self._turn(prompt), add_special_tokens=False).ids
        accepted = response.events.add(handle=command.handle).accepted
        accepted.max_tokens.append(request.stopping.max_tokens)
        accepted.cached_tokens.append(0)
        for position in range(0, len(ids), _PIECE):
            delta = response.events.add(handle=command.handle).delta
            delta.position = position
            delta.tokens.ids.extend(ids[position : position + _PIECE])
        finished = response.events.add(handle=command.handle).finished
        finished.reason = types_pb2.FINISH_REASON_STOP
        finished.match.eos_token_id = ids[-1]
        finished.completion_tokens = len(ids)
        usage = response.events.add(handle=command.handle).completed.usage
        usage.prompt_tokens, usage.completion_tokens = len(request.prompts[0].ids), len(ids)
        return response


@asynccontextmanager
async def running_engine(engine: ScriptedEngine) -> AsyncIterator[str]:
    """Serve an engine; yield its target."""
    server = grpc.aio.server(options=MESSAGE_LIMITS)
    add_EngineServiceServicer_to_server(engine, server)
    add_EngineControlServiceServicer_to_server(engine, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for name in ("", "tokenwire.engine.v1.EngineService"):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
