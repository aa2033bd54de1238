"""Failed, changed and paused streams when a service is killed or restarted under load.

    python -m benchmarks.faults --times 5

The benchmark starts the four services as systemd does: each is a process of its own, is restarted
when it ends, and the shim's socket stays open meanwhile. Each round has running streams of several
kinds, and new requests that start with the fault. Their texts are compared with the texts of a
round without a fault.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx
import psutil

from services.common.network.addresses import listen
from services.common.network.health import is_ready, is_serving
from tokenwire.serving.stack_layout import embedded_checkpoint

__all__ = ["main"]

_POLL_SECONDS = 0.05
_READY_SECONDS = 300.0
_PIECES = 5
"""Pieces of text that each stream exceeds before the fault"""
_NEWCOMERS = 8
_APART_SECONDS = 0.1
"""Time between two new requests"""
_SERVICES = ("grammar", "engine", "tokenizer", "http_shim")
_PROMPTS = ("import json\n\n", "def load(path):\n", "class Reader:\n", "for line in lines:\n")
_GRAMMAR = {"type": "regex", "value": "([a-z ]{4}[0-9]{2},){400}"}
_CHAT = {"messages": [{"role": "user", "content": "Say hello, and go on."}]}
_KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "seeded": {"temperature": 0.8, "top_p": 0.9},
    "n=2": {"temperature": 0.8, "n": 2},
    "logprobs": {"temperature": 0.8, "logprobs": 3},
    "grammar": {"temperature": 0.8, "grammar": _GRAMMAR, "ignore_eos": False},
    "chat": {"temperature": 0.8, **_CHAT},
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A signal to one service's process."""

    name: str
    service: str
    number: signal.Signals
    hits_loop: bool = False
    """True sends the signal to the process of the engine's step loop, not to its gRPC process"""


_LOGS = Path(tempfile.gettempdir()) / "tokenwire-faults"
_FAULTS = (
    Fault("kill engine", "engine", signal.SIGKILL),
    Fault("kill engine's worker", "engine", signal.SIGKILL, hits_loop=True),
    Fault("kill grammar", "grammar", signal.SIGKILL),
    Fault("kill tokenizer", "tokenizer", signal.SIGKILL),
    Fault("kill shim", "http_shim", signal.SIGKILL),
    Fault("restart engine", "engine", signal.SIGTERM),
    Fault("restart grammar", "grammar", signal.SIGTERM),
    Fault("restart tokenizer", "tokenizer", signal.SIGTERM),
    Fault("restart shim", "http_shim", signal.SIGTERM),
)


@dataclass(slots=True)
class Stream:
    """The response to one request."""

    kind: str
    text: dict[int, str] = field(default_factory=dict)
    """Text by index of the choice"""
    pieces: int = 0
    longest_pause: float = 0.0
    """Seconds between two pieces of text, or before the first"""
    is_done: bool = False
    failure: str = ""


class Stack:
    """The four services. A service that ends is started again."""

    def __init__(self, model: Path, port: int, logs: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._socket = listen("127.0.0.1", port)
        self.targets = {name: f"127.0.0.1:{port + 1 + i}" for i, name in enumerate(_SERVICES[:3])}
        self._logs = logs
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        fd = self._socket.fileno()
        self._arguments: dict[str, tuple[str, ...]] = {
            "grammar": (*self._listen("grammar"), "--model", str(model)),
            "engine": (
                *(*self._listen("engine"), "--model", str(model), "--dtype", "float32"),
                *("--kv-memory", "512MiB", "--grammar", self.targets["grammar"]),
            ),
            "tokenizer": (
                *(*self._listen("tokenizer"), "--model", str(model)),
                *("--engine", self.targets["engine"]),
            ),
            "http_shim": ("--fd", str(fd), "--tokenizer", self.targets["tokenizer"]),
        }

    def _listen(self, name: str) -> tuple[str, ...]:
        return ("--port", self.targets[name].rpartition(":")[2], "--metrics-port", "-1")

    async def start(self) -> None:
        """Start the services and wait until the shim is ready."""
        for name in _SERVICES:
            await self._start(name)
        await self.until_ready()

    async def _start(self, name: str) -> None:
        command = [sys.executable, "-m", f"services.{name}", *self._arguments[name]]
        with (self._logs / f"{name}.log").open("ab") as log:
            self._processes[name] = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, pass_fds=(self._socket.fileno(),)
            )

    async def until_ready(self) -> None:
        """Wait until all services are ready. Raises TimeoutError."""
        async with asyncio.timeout(_READY_SECONDS):
            for target in self.targets.values():
                await _until(lambda target=target: is_serving(target))  # type: ignore[misc]
            await _until(lambda: is_ready(f"{self.url}/ready"))

    def processes(self) -> list[psutil.Process]:
        """Return the services' processes and those that they have started."""
        services = [psutil.Process(process.pid) for process in self._processes.values()]
        children = [child for each in services for child in each.children(recursive=True)]
        return services + children

    async def inflict(self, fault: Fault) -> None:
        """Signal a process, wait for its end, and start the service again."""
        process = self._processes[fault.service]
        pid = _loop_process(process.pid) if fault.hits_loop else process.pid
        os.kill(pid, fault.number)
        await process.wait()
        await self._start(fault.service)

    async def stop(self) -> None:
        """Stop the services, the shim first."""
        for name in reversed(_SERVICES):
            if (process := self._processes.get(name)) is not None and process.returncode is None:
                process.terminate()
                await process.wait()
        self._socket.close()


async def _until(probe: Callable[[], Any]) -> None:
    while not await probe():  # noqa: ASYNC110 - another process has no event to wait for
        await asyncio.sleep(_POLL_SECONDS)


def _loop_process(pid: int) -> int:
    children = psutil.Process(pid).children()
    return next(child.pid for child in children if "spawn_main" in " ".join(child.cmdline()))


async def _ask(http: httpx.AsyncClient, url: str, stream: Stream, seed: int, tokens: int) -> Stream:
    """Send one streamed request and read it to its end."""
    kind, last = stream.kind, time.monotonic()
    body: dict[str, Any] = {"model": "default", "stream": True, "max_tokens": tokens, "seed": seed}
    body |= {"ignore_eos": True, **_KINDS[kind]}
    path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
    if kind != "chat":
        body["prompt"] = _PROMPTS[seed % len(_PROMPTS)]
    try:
        async with http.stream("POST", url + path, json=body) as answer:
            if answer.status_code != 200:
                stream.failure = f"{answer.status_code} {(await answer.aread()).decode()[:200]}"
                return stream
            async for line in answer.aiter_lines():
                now = time.monotonic()
                if line:
                    last = _take(stream, line, now, last)
    except httpx.HTTPError as error:
        stream.failure = type(error).__name__
    else:
        if not stream.is_done:
            stream.failure = stream.failure or "the stream ended without [DONE]"
    return stream


def _take(stream: Stream, line: str, now: float, last: float) -> float:
    """Read one line. Return the time of the last piece of text; comments do not count."""
    if not line.startswith("data: "):
        return last
    if line == "data: [DONE]":
        stream.is_done = True
        return last
    message = json.loads(line.removeprefix("data: "))
    if "error" in message:
        stream.failure = str(message["error"])[:200]
        return last
    for choice in message["choices"]:
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        stream.text[choice["index"]] = stream.text.get(choice["index"], "") + text
    stream.pieces += 1
    stream.longest_pause = max(stream.longest_pause, now - last)
    return now


async def _round(
    stack: Stack, fault: Fault | None, streams: int, tokens: int
) -> tuple[list[Stream], list[Stream]]:
    """Run streams, inflict the fault, and start new requests. Return both groups."""
    kinds = list(_KINDS)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=_READY_SECONDS, limits=limits) as http:
        under_way: list[Stream] = []

        def ask(seed: int) -> asyncio.Task[Stream]:
            stream = Stream(kinds[seed % len(kinds)])
            under_way.append(stream)
            return asyncio.ensure_future(_ask(http, stack.url, stream, seed, tokens))

        running = [ask(seed) for seed in range(streams)]
        await _until_under_way(under_way, streams)
        inflicted = asyncio.ensure_future(stack.inflict(fault)) if fault is not None else None
        newcomers: list[asyncio.Task[Stream]] = []
        for seed in range(streams, streams + _NEWCOMERS):
            newcomers.append(ask(seed))
            await asyncio.sleep(_APART_SECONDS)
        ended = await asyncio.gather(*running), await asyncio.gather(*newcomers)
        if inflicted is not None:
            await inflicted
        return list(ended[0]), list(ended[1])


async def _until_under_way(streams: Sequence[Stream], count: int) -> None:
    """Wait until `count` streams have failed or have more than `_PIECES` pieces of text."""
    while sum(each.pieces > _PIECES or bool(each.failure) for each in streams) < count:  # noqa: ASYNC110
        await asyncio.sleep(_POLL_SECONDS)


def _row(
    fault: Fault,
    rounds: Sequence[tuple[list[Stream], list[Stream]]],
    calm: tuple[list[Stream], list[Stream]],
) -> str:
    running = [stream for streams, _ in rounds for stream in streams]
    new = [stream for _, newcomers in rounds for stream in newcomers]
    changed = len(_changed_kinds(rounds, calm))
    pauses = [max(s.longest_pause for s in [*streams, *late]) for streams, late in rounds]
    failed = [sum(bool(stream.failure) for stream in part) for part in (running, new)]
    return (
        f"| {fault.name} | {len(rounds)} | {failed[0]} of {len(running)} | {failed[1]} of "
        f"{len(new)} | {changed} | {statistics.median(pauses):.1f} s | {max(pauses):.1f} s |"
    )


def _changed_kinds(
    rounds: Sequence[tuple[list[Stream], list[Stream]]], calm: tuple[list[Stream], list[Stream]]
) -> list[str]:
    """Return the kind of each stream whose text differs, with the first place where it does."""
    return [
        f"{stream.kind} at {_first_difference(stream, undisturbed)}"
        for now in rounds
        for part, calm_part in zip(now, calm, strict=True)
        for stream, undisturbed in zip(part, calm_part, strict=True)
        if not stream.failure and stream.text != undisturbed.text
    ]


def _first_difference(stream: Stream, undisturbed: Stream) -> str:
    for index, text in sorted(stream.text.items()):
        before = undisturbed.text.get(index, "")
        if text != before:
            pairs = enumerate(zip_longest(text, before))
            place = next(place for place, (one, other) in pairs if one != other)
            return f"choice {index}, {place} of {len(before)}: {before[place:][:20]!r}"
    return "a choice that is missing"


async def _measure(arguments: argparse.Namespace) -> None:
    stack = Stack(arguments.model, arguments.port, arguments.logs)
    wanted = [fault for fault in _FAULTS if arguments.only in fault.name]
    try:
        await stack.start()
        calm = await _round(stack, None, arguments.streams, arguments.tokens)
        again = await _round(stack, None, arguments.streams, arguments.tokens)
        print(
            "| fault | times | streams failed | newcomers failed | changed | pause, median | most |"
        )
        print("|---|---|---|---|---|---|---|")
        print(_row(Fault("none", "", signal.SIGTERM), [again], calm), flush=True)
        for fault in wanted:
            rounds = []
            for _ in range(arguments.times):
                rounds.append(await _round(stack, fault, arguments.streams, arguments.tokens))
                await stack.until_ready()
            print(_row(fault, rounds, calm), flush=True)
            for why in sorted({s.failure for r in rounds for part in r for s in part} - {""}):
                print(f"  {fault.name}: {why}", file=sys.stderr)
            for kind in _changed_kinds(rounds, calm):
                print(f"  {fault.name}: changed {kind}", file=sys.stderr)
    finally:
        await stack.stop()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, default=embedded_checkpoint())
    parser.add_argument(
        "--port", type=int, default=21600, help="port of the shim; the next 3 are the services'"
    )
    parser.add_argument("--streams", type=int, default=42, help="streams before the fault")
    parser.add_argument("--tokens", type=int, default=200, help="output tokens of each choice")
    parser.add_argument("--times", type=int, default=5, help="rounds of each fault")
    parser.add_argument("--only", default="", help="run the faults whose names contain this")
    parser.add_argument("--logs", type=Path, default=_LOGS, help="directory of the logs")
    arguments = parser.parse_args()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    asyncio.run(_measure(arguments))


if __name__ == "__main__":
    main()
