"""Gateways of other projects in front of Tokenwire stacks."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.stack import (
    RunningService,
    free_ports,
    is_busy,
    is_idle,
    metrics_of,
    running_service,
    watch_load,
)
from tokenwire.client import Client
from tokenwire.messages import Message

__all__ = ["CHAT", "WEATHER", "Gateway", "Worker", "running_gateway", "running_workers"]

CHAT = [{"role": "user", "content": "Write a function that adds two numbers"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}},
    "required": ["city"],
    "additionalProperties": False,
}

_HANG_SECONDS = 90
_POLL_SECONDS = 0.1
_GENERATED = "tokenwire_engine_generated_tokens_total"
_LONG = 1_500
"""Tokens of an answer that nobody waits for"""


@dataclass(frozen=True, slots=True)
class Worker:
    """A tokenizer service that speaks vLLM's gRPC, and the one engine behind it."""

    tokenizer: RunningService
    engine: RunningService


@dataclass(frozen=True, slots=True)
class Gateway:
    """A running gateway."""

    http: httpx.AsyncClient
    model: str
    workers: Sequence[Worker]

    async def post(self, path: str, **body: Any) -> Any:
        """Return the JSON answer to a request for the model."""
        answer = await self.http.post(path, json={"model": self.model, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def stream_chat(self, **body: Any) -> tuple[str, Any]:
        """Return the text of a streamed chat, and its usage."""
        text, usage = "", None
        request = {"model": self.model, "messages": CHAT, "stream": True, **body}
        async with self.http.stream("POST", "/v1/chat/completions", json=request) as stream:
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    usage = chunk.get("usage") or usage
                    text += "".join(each["delta"].get("content") or "" for each in chunk["choices"])
        return text, usage

    async def check_chat(self) -> None:
        """Assert that a chat has the answer that Tokenwire gives itself, streamed or whole."""
        asked = {"temperature": 0, "max_tokens": 24}
        answer = await self.post("/v1/chat/completions", messages=CHAT, **asked)
        async with Client(self.workers[0].tokenizer.target) as client:
            said = Message(role="user", content=CHAT[0]["content"])
            expected = await client.generate([said], temperature=0, max_tokens=24)
        [choice] = answer["choices"]
        assert choice["message"]["content"] == expected.text
        assert choice["finish_reason"] == "stop"
        assert answer["usage"]["prompt_tokens"] == expected.usage.prompt_tokens
        assert answer["usage"]["completion_tokens"] == expected.usage.completion_tokens
        assert (await self.stream_chat(**asked))[0] == expected.text

    async def leave_early(self, path: str, **body: Any) -> None:
        """Ask for a long answer and leave. Assert that no engine computes it, or keeps blocks."""
        engines = [worker.engine.target for worker in self.workers]
        before = [(await metrics_of(engine))[_GENERATED] for engine in engines]
        busy = [asyncio.ensure_future(watch_load(each, until=is_busy)) for each in engines]
        request = {"model": self.model, "max_tokens": _LONG, **body}
        leaving = asyncio.ensure_future(self.http.post(path, json=request))
        await asyncio.wait(busy, return_when=asyncio.FIRST_COMPLETED)
        for task in (leaving, *busy):
            task.cancel()
        for engine, count in zip(engines, before, strict=True):
            await watch_load(engine, until=is_idle)
            assert (await metrics_of(engine))[_GENERATED] - count < _LONG


@asynccontextmanager
async def running_workers(model: Path, logs: Path, count: int) -> AsyncIterator[Sequence[Worker]]:
    """Run a grammar service, and `count` engines with a tokenizer service each."""
    checkpoint = ("--model", str(model))
    few = ("--dtype", "float32", "--threads", "1", "--kv-memory", "64MiB")
    async with AsyncExitStack() as stack:

        async def start(name: str, log: str, *flags: str) -> RunningService:
            running = running_service(name, *checkpoint, *flags, log=logs / log)
            return await stack.enter_async_context(running)

        async def start_worker(number: int) -> Worker:
            log, flags = f"engine-{number}.log", (*few, "--grammar", grammar.target)
            engine = await start("engine", log, *flags)
            log, before = f"tokenizer-{number}.log", ("--engine", engine.target, "--vllm-api")
            return Worker(await start("tokenizer", log, *before), engine)

        grammar = await start("grammar", "grammar.log")
        yield [await start_worker(number) for number in range(count)]


@asynccontextmanager
async def running_gateway(
    module: str, arguments: Sequence[str], workers: Sequence[Worker], model: Path, log: Path
) -> AsyncIterator[Gateway]:
    """Run `python -m MODULE ARGUMENTS --worker-urls …`; yield it once it answers a chat."""
    [port, metrics] = free_ports(2)
    command = [
        *(sys.executable, "-m", module, *arguments),
        *("--worker-urls", *(f"grpc://{worker.tokenizer.target}" for worker in workers)),
        *("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)),
    ]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdout=output,
            stderr=output,
            env=os.environ | {"VLLM_ROUTER_TOKENIZER": str(model)},
        )
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=_HANG_SECONDS) as http:
            gateway = Gateway(http, model.name, workers)
            async with asyncio.timeout(_HANG_SECONDS):
                while not await _answers(gateway):
                    assert process.returncode is None, log.read_text()  # noqa: ASYNC240
                    await asyncio.sleep(_POLL_SECONDS)
            yield gateway
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answers(gateway: Gateway) -> bool:
    """Return whether the gateway knows its workers and their tokenizer."""
    messages = [{"role": "user", "content": "x"}]
    body = {"model": gateway.model, "messages": messages, "max_tokens": 1}
    try:
        return (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
    except httpx.TransportError:
        return False
