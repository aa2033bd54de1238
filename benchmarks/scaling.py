"""Tokens/s of one tokenizer service, or of several, in front of simulated engines.

    python -m benchmarks.scaling --engines 1,2,4,8 --tokenizers 1

A simulated engine speaks the whole protocol, and draws one token for each of up to 32 sequences
in each step, which takes a fixed time. So the engines never limit the tokenizer service, and the
figures show what that costs and where it saturates. The clients share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from tokenizers import Tokenizer

from benchmarks.processes import free_port
from services.common.network.health import is_serving
from tokenwire.channel import connect
from tokenwire.channel_options import MESSAGE_LIMITS, QUIET
from tokenwire.client import Client
from tokenwire.pb.completion.v1 import models_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import (
    EngineControlServiceServicer,
    EngineServiceServicer,
    add_EngineControlServiceServicer_to_server,
    add_EngineServiceServicer_to_server,
)
from tokenwire.pb.types.v1 import types_pb2
from tokenwire.serving.stack_layout import embedded_checkpoint

_SEQUENCES = 32
"""Sequences of a simulated engine"""
_STEP_SECONDS = 0.025
_PROMPT, _OUTPUT = 128, 128
_IDS = (300, 2_000)
"""Range of the generated ids"""
_SECONDS = 10.0
_POLL_SECONDS = 0.1


@dataclass(slots=True)
class _Running:
    """A sequence of a simulated engine."""

    handle: int
    max_tokens: int
    prompt_tokens: int
    position: int = 0


class SimulatedEngine(EngineServiceServicer, EngineControlServiceServicer):
    """Serves Sessions of plain requests, one sequence each."""

    def __init__(self, vocabulary_size: int) -> None:
        self._vocabulary_size = vocabulary_size
        self._running = 0

    async def GetModel(self, request: Any, context: Any) -> engine_pb2.GetModelResponse:
        return engine_pb2.GetModelResponse(
            model="simulated",
            architecture="Simulated",
            dtype="float32",
            device="cpu",
            context_length=4096,
            vocabulary_size=self._vocabulary_size,
            capabilities=[number for number in engine_pb2.Capability.values() if number],
            max_logprobs=20,
            max_sequences_per_request=128,
            max_running_sequences=_SEQUENCES,
            block_size=32,
            total_blocks=16_384,
        )

    async def GetLoad(self, request: Any, context: Any) -> engine_pb2.GetLoadResponse:
        return engine_pb2.GetLoadResponse(load=self._load())

    async def WatchLoad(
        self, request: Any, context: Any
    ) -> AsyncIterator[engine_pb2.WatchLoadResponse]:
        while True:
            yield engine_pb2.WatchLoadResponse(load=self._load())
            await asyncio.sleep(request.interval_seconds)

    async def WatchCache(
        self, request: Any, context: Any
    ) -> AsyncIterator[engine_pb2.WatchCacheResponse]:
        yield engine_pb2.WatchCacheResponse(number=1, is_whole=True)
        await asyncio.get_running_loop().create_future()

    async def Session(
        self, requests: AsyncIterator[engine_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[engine_pb2.SessionResponse]:
        await context.send_initial_metadata(())
        running: list[_Running] = []
        arrived: list[engine_pb2.SessionCommand] = []

        async def read() -> None:
            async for request in requests:
                arrived.extend(request.commands)

        reading = asyncio.ensure_future(read())
        due = time.monotonic()
        try:
            while not reading.done():
                due = max(due + _STEP_SECONDS, time.monotonic())
                await asyncio.sleep(due - time.monotonic())
                response = engine_pb2.SessionResponse()
                starts = [command for command in arrived if command.HasField("start")]
                running.extend(_start(command, response) for command in starts)
                arrived.clear()
                running = _step(running, response)
                self._running = len(running)
                if response.events:
                    yield response
        finally:
            reading.cancel()

    def _load(self) -> engine_pb2.Load:
        return engine_pb2.Load(
            running_sequences=self._running, free_blocks=16_384, total_blocks=16_384
        )


def _start(command: engine_pb2.SessionCommand, response: engine_pb2.SessionResponse) -> _Running:
    request = command.start.request
    accepted = response.events.add(handle=command.handle).accepted
    accepted.max_tokens.append(request.stopping.max_tokens)
    accepted.cached_tokens.append(0)
    return _Running(command.handle, request.stopping.max_tokens, len(request.prompts[0].ids))


def _step(running: list[_Running], response: engine_pb2.SessionResponse) -> list[_Running]:
    """Draw a token for each sequence; return those that have not ended."""
    for place, each in enumerate(running[:_SEQUENCES]):
        delta = response.events.add(handle=each.handle).delta
        delta.position = each.position
        delta.tokens.ids.append(_IDS[0] + (place * 37 + each.position) % (_IDS[1] - _IDS[0]))
        each.position += 1
        if each.position == each.max_tokens:
            finished = response.events.add(handle=each.handle).finished
            finished.reason = types_pb2.FINISH_REASON_LENGTH
            finished.completion_tokens = each.position
            usage = response.events.add(handle=each.handle).completed.usage
            usage.prompt_tokens, usage.completion_tokens = each.prompt_tokens, each.position
    return [each for each in running if each.position < each.max_tokens]


async def _simulate(port: int, model: Path) -> None:
    """Serve a simulated engine until the process is ended."""
    options = [*MESSAGE_LIMITS, *QUIET, ("grpc.http2.min_ping_interval_without_data_ms", 250)]
    server = grpc.aio.server(options=options)
    vocabulary = Tokenizer.from_file(str(model / "tokenizer.json")).get_vocab_size()
    engine = SimulatedEngine(vocabulary)  # type: ignore[abstract]  # the others are unimplemented
    add_EngineServiceServicer_to_server(engine, server)
    add_EngineControlServiceServicer_to_server(engine, server)
    health = health_aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for name in ("", "tokenwire.engine.v1.EngineService"):
        await health.set(name, health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


@asynccontextmanager
async def _process(module: str, port: int, *flags: str) -> AsyncIterator[psutil.Process]:
    command = (sys.executable, "-m", module, "--port", str(port), *flags)
    process = await asyncio.create_subprocess_exec(*command)
    try:
        while not await is_serving(f"127.0.0.1:{port}"):  # noqa: ASYNC110 - another process
            await asyncio.sleep(_POLL_SECONDS)
        yield psutil.Process(process.pid)
    finally:
        process.terminate()
        await process.wait()


async def _until_all_serve(target: str, count: int) -> None:
    async with connect(target) as channel:
        stub = CompletionServiceStub(channel)
        serving = 0
        while serving < count:
            answer = await stub.GetStatus(models_pb2.GetStatusRequest())
            states = [engine.state for engine in answer.models[0].engines]
            serving = states.count(models_pb2.ENGINE_STATE_SERVING)
            await asyncio.sleep(_POLL_SECONDS)


async def _measure(model: Path, engines: int, tokenizers: int) -> None:
    """Print tokens/s, and the CPU time of a tokenizer service per token."""
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        ports = [free_port() for _ in range(engines)]
        simulated = ("--simulate", "--model", str(model))
        for port in ports:
            await enter(_process("benchmarks.scaling", port, *simulated))
        targets = ",".join(f"127.0.0.1:{port}" for port in ports)
        flags = ("--model", str(model), "--engine", targets, "--metrics-port", "-1")
        quiet = ("--log-level", "warning")
        clients, processes = [], []
        for _ in range(tokenizers):
            port = free_port()
            processes.append(await enter(_process("services.tokenizer", port, *flags, *quiet)))
            await _until_all_serve(f"127.0.0.1:{port}", engines)
            clients.append(await enter(Client(f"127.0.0.1:{port}")))
        tokens = [0]
        streams = [
            asyncio.ensure_future(_stream(clients[i % tokenizers], i, tokens))
            for i in range(engines * _SEQUENCES)
        ]
        await asyncio.sleep(_SECONDS / 4)
        before, began = tokens[0], time.monotonic()
        cpu = sum(_cpu(process) for process in processes)
        mine = time.process_time()
        await asyncio.sleep(_SECONDS)
        seconds, made = time.monotonic() - began, tokens[0] - before
        cpu = sum(_cpu(process) for process in processes) - cpu
        mine = time.process_time() - mine
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    ideal = engines * _SEQUENCES / _STEP_SECONDS
    print(
        f"| {engines} | {tokenizers} | {made / seconds:,.0f} | {made / seconds / ideal:.0%} "
        f"| {cpu / seconds / tokenizers:.0%} | {1e6 * cpu / made:.1f} µs | {mine / seconds:.0%} |",
        flush=True,
    )


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _stream(client: Client, number: int, tokens: list[int]) -> None:
    """Send one request after the other; count the tokens that come."""
    turn = 0
    while True:
        turn += 1
        prompt = [(number * 131 + turn * 17 + place) % 2_000 + 100 for place in range(_PROMPT)]
        async with client.stream(prompt, max_tokens=_OUTPUT, ignore_eos=True) as stream:
            async for delta in stream:
                tokens[0] += len(delta.token_ids)


async def _run(arguments: argparse.Namespace) -> None:
    print("| engines | tokenizers | tokens/s | of the ideal | CPU of each | per token | client |")
    print("|---|---|---|---|---|---|---|")
    for engines in map(int, arguments.engines.split(",")):
        await _measure(arguments.model, engines, arguments.tokenizers)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    parser.add_argument("--engines", default="1,2,4,8", help="numbers of simulated engines")
    parser.add_argument("--tokenizers", type=int, default=1, help="tokenizer services")
    parser.add_argument("--simulate", action="store_true", help="be a simulated engine")
    parser.add_argument("--port", type=int, default=0, help="of the simulated engine")
    arguments = parser.parse_args()
    simulates = arguments.simulate
    uvloop.run(_simulate(arguments.port, arguments.model) if simulates else _run(arguments))


if __name__ == "__main__":
    main()
