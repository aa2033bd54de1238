"""Delays that floods from one client cause for another client.

    python -m benchmarks.floods

The benchmark starts the four services and prints one row per flood: the other client's
inter-token times in one stream, the latency of its requests for four tokens, and the memory that
the services took meanwhile.
"""

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import httpx
import psutil

from benchmarks.faults import Stack
from benchmarks.http2_frames import HTTP2_FLOODS, send_frames
from tokenwire.channel import connect
from tokenwire.pb.completion.v1 import completion_pb2
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.serving.stack_layout import embedded_checkpoint

__all__ = ["main"]

Flood: TypeAlias = Callable[[Stack, httpx.AsyncClient], Awaitable[str | None]]
"""Function that sends the flood, and returns the place where the server cut it, or nothing"""

_SECONDS = 15.0
_NEWCOMER_SECONDS = 0.5
"""Pause between two requests for four tokens"""
_PATH = "/v1/completions"
_GREEDY = {"model": "default", "temperature": 0, "ignore_eos": True}
_MANY_PROMPTS = b'{"model":"default","prompt":[' + b"[1]," * 2_000_000 + b"[1]]}"
_MANY_STARTS = 100_000
_CHOICES = 128
_LARGE_CHATS = 60
_CHAT_BYTES = 4_000_000
_LONG_PROMPT = [5] * 1_900


@dataclass(slots=True)
class Bystander:
    """Delays of a client that does not flood, in seconds."""

    gaps: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    cut: str = ""
    """Place where the server cut the flood; empty: it did not"""
    taken_bytes: int = 0
    """Largest growth of the services' memory"""

    async def read(self, stack: Stack, http: httpx.AsyncClient) -> None:
        """Stream completions, one after another, and record the times between their events."""
        body = {**_GREEDY, "prompt": "import json\n", "stream": True, "max_tokens": 1_500}
        while True:
            async with http.stream("POST", stack.url + _PATH, json=body) as answer:
                last = None
                async for line in answer.aiter_lines():
                    now = time.monotonic()
                    if line.startswith("data: {"):
                        if last is not None:
                            self.gaps.append(now - last)
                        last = now

    async def arrive(self, stack: Stack, http: httpx.AsyncClient) -> None:
        """Send requests for four tokens, one after another, and record their latencies."""
        body = {**_GREEDY, "prompt": "def f(", "max_tokens": 4}
        while True:
            began = time.monotonic()
            answer = await http.post(stack.url + _PATH, json=body)
            self.latencies.append(time.monotonic() - began)
            self.refused += answer.status_code != 200
            await asyncio.sleep(_NEWCOMER_SECONDS)

    async def watch(self, stack: Stack) -> None:
        """Record how much memory the services take, which changes by pages of their caches too."""
        before = _memory(stack)
        while True:
            await asyncio.sleep(0.1)
            self.taken_bytes = max(self.taken_bytes, _memory(stack) - before)

    async def suffer(self, flood: Flood, stack: Stack, http: httpx.AsyncClient) -> None:
        """Run a flood against the services."""
        self.cut = await flood(stack, http) or ""


def _memory(stack: Stack) -> int:
    total = 0
    for process in stack.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


async def _calm(stack: Stack, http: httpx.AsyncClient) -> None:
    await asyncio.sleep(_SECONDS)


async def _post(stack: Stack, http: httpx.AsyncClient, fields: Mapping[str, Any]) -> None:
    await http.post(stack.url + _PATH, json={**_GREEDY, **fields})


async def _large_bodies(stack: Stack, http: httpx.AsyncClient) -> None:
    """Send 8 MB of [[1],[1],…] repeatedly."""
    while True:
        answer = await http.post(
            stack.url + _PATH, content=_MANY_PROMPTS, headers={"content-type": "application/json"}
        )
        assert 400 <= answer.status_code < 500, answer.status_code


async def _large_chats(stack: Stack, http: httpx.AsyncClient) -> None:
    """Send 60 chats of 4 MB at once."""
    message = {"role": "user", "content": "word " * (_CHAT_BYTES // 5)}
    content = json.dumps({"model": "default", "messages": [message]}).encode()
    headers = {"content-type": "application/json"}
    url = f"{stack.url}/v1/chat/completions"
    posts = (http.post(url, content=content, headers=headers) for _ in range(_LARGE_CHATS))
    await asyncio.gather(*posts)


def _frames(frames: Callable[[], Iterable[bytes]]) -> Flood:
    async def flood(stack: Stack, http: httpx.AsyncClient) -> str:
        return await send_frames(stack.targets["tokenizer"], frames())

    return flood


async def _many_starts(stack: Stack, http: httpx.AsyncClient) -> None:
    """Send one Session message with 100,000 starts that the service refuses."""
    await _session(stack, completion_pb2.GenerateRequest())


async def _many_valid_starts(stack: Stack, http: httpx.AsyncClient) -> None:
    """Send one Session message with 100,000 starts that the service accepts or queues."""
    prompt = completion_pb2.Prompt(text="x")
    await _session(
        stack,
        completion_pb2.GenerateRequest(
            model="default", prompts=completion_pb2.Prompts(items=[prompt])
        ),
    )


async def _session(stack: Stack, request: completion_pb2.GenerateRequest) -> None:
    start = completion_pb2.SessionStart(request=request)
    commands = [
        completion_pb2.SessionCommand(handle=handle, start=start)
        for handle in range(1, _MANY_STARTS + 1)
    ]
    async with connect(stack.targets["tokenizer"]) as channel:
        call = CompletionServiceStub(channel).Session()
        await call.write(completion_pb2.SessionRequest(commands=commands))
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass


async def _many_choices(stack: Stack, http: httpx.AsyncClient) -> None:
    """Send requests with n=128 on two connections repeatedly."""
    fields = {"prompt": "import json\n", "n": _CHOICES, "temperature": 1, "max_tokens": 200}
    while True:
        await asyncio.gather(*(_post(stack, http, fields) for _ in range(2)))


async def _long_choices(stack: Stack, http: httpx.AsyncClient) -> None:
    """Send n=128 on a prompt that fills the context repeatedly."""
    while True:
        await _post(stack, http, {"prompt": _LONG_PROMPT, "n": _CHOICES, "max_tokens": 2})


async def _never_reading(stack: Stack, http: httpx.AsyncClient) -> None:
    """Open six streams with n=128 and never read them."""
    async with contextlib.AsyncExitStack() as streams:
        for _ in range(6):
            fields = {"prompt": "x", "n": _CHOICES, "max_tokens": 1_000, "stream": True}
            await streams.enter_async_context(
                http.stream("POST", stack.url + _PATH, json={**_GREEDY, **fields})
            )
        await asyncio.sleep(_SECONDS)


_FLOODS: Mapping[str, Flood] = {
    "none": _calm,
    "8 MB of [[1],[1],…]": _large_bodies,
    "100,000 wrong starts in a message": _many_starts,
    "100,000 right starts in a message": _many_valid_starts,
    "2 connections with n=128": _many_choices,
    "n=128 on 1,900 tokens": _long_choices,
    "6 streams with n=128, never read": _never_reading,
    "60 chats of 4 MB": _large_chats,
    **{name: _frames(frames) for name, frames in HTTP2_FLOODS.items()},
}


@contextlib.asynccontextmanager
async def _running(*works: Awaitable[None]) -> AsyncIterator[None]:
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended


async def _beside(stack: Stack, flood: Flood) -> Bystander:
    bystander = Bystander()
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(timeout=300, limits=limits) as http,
        httpx.AsyncClient(timeout=300, limits=limits) as flooding,
        _running(
            bystander.read(stack, http), bystander.arrive(stack, http), bystander.watch(stack)
        ),
        _running(bystander.suffer(flood, stack, flooding)),
    ):
        await asyncio.sleep(_SECONDS)
    return bystander


def _row(name: str, seen: Bystander) -> str:
    gaps = sorted(seen.gaps)
    times = (statistics.median(gaps), gaps[int(len(gaps) * 0.99)], gaps[-1])
    stream = " | ".join(f"{1000 * seconds:.0f}" for seconds in times)
    late = " | ".join(
        f"{1000 * seconds:.0f}"
        for seconds in (statistics.median(seen.latencies), max(seen.latencies))
    )
    taken = f"{seen.taken_bytes / 2**20:.0f}"
    return f"| {name} | {stream} | {late} | {seen.refused} | {taken} | {seen.cut} |"


async def _measure(arguments: argparse.Namespace) -> None:
    stack = Stack(arguments.model, arguments.port, arguments.logs)
    try:
        await stack.start()
        print(
            "| flood | inter-token p50, ms | p99 | most | 4 tokens, median, ms | most | refused"
            " | memory, MiB | cut |"
        )
        print("|---|---|---|---|---|---|---|---|---|")
        for name, flood in _FLOODS.items():
            if name == "none" or arguments.only in name:
                print(_row(name, await _beside(stack, flood)), flush=True)
                await stack.until_ready()
                await asyncio.sleep(_SECONDS)  # The engine ends the flood's requests meanwhile.
    finally:
        await stack.stop()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Delays that floods cause for another client.")
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    parser.add_argument(
        "--port", type=int, default=21600, help="port of the shim; the next 3 are the services'"
    )
    parser.add_argument("--only", default="", help="run the floods whose names contain this")
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()))
    asyncio.run(_measure(parser.parse_args()))


if __name__ == "__main__":
    main()
