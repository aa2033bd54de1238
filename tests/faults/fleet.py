"""A fleet of services as processes, each of which can be killed, frozen, cut off or restarted."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from services.common.network.health import is_ready, is_serving
from tests.faults.link import Link
from tests.stack import free_ports, loop_process
from tokenwire.channel import connect
from tokenwire.pb.engine.v1 import engine_pb2
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub

__all__ = ["Fleet", "Node", "running_fleet"]

_POLL_SECONDS = 0.05
_READY_SECONDS = 120.0
_LOST_SECONDS = "2"


class Node:
    """One process of a service, which keeps its address over its restarts."""

    def __init__(self, service: str, number: int, port: int, flags: Sequence[str], log: Path):
        self.service = service
        self.name = f"{service} {number}"
        self.target = f"127.0.0.1:{port}"
        self._command = (sys.executable, "-m", f"services.{service}", "--port", str(port), *flags)
        self._log = log / f"{service}-{number}.log"
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def start(self) -> None:
        """Start the process; don't wait until it is ready."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command, stdout=log, stderr=log
            )

    async def until_ready(self) -> None:
        """Wait until the service serves."""
        ready = is_ready if self.service == "http_shim" else is_serving
        where = f"http://{self.target}/ready" if self.service == "http_shim" else self.target
        async with asyncio.timeout(_READY_SECONDS):
            while not await ready(where):  # noqa: ASYNC110 - another process
                await asyncio.sleep(_POLL_SECONDS)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self.pid, number)

    def kill_loop(self) -> None:
        """Kill the process of an engine's step loop."""
        os.kill(loop_process(self.pid), signal.SIGKILL)

    async def start_again(self) -> None:
        """Wait for the end of the process; start it again, and wait until it serves."""
        assert self._process is not None
        await self._process.wait()
        await self.start()
        await self.until_ready()

    async def stop(self) -> None:
        """Kill the process."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.send(signal.SIGCONT)
                self.send(signal.SIGKILL)
            await self._process.wait()


class Fleet:
    """Engines, grammar services, tokenizer services and shims, and the links to the engines."""

    def __init__(self, nodes: Sequence[Node], links: Sequence[Link]) -> None:
        self.nodes = nodes
        self.links = links

    def of(self, service: str) -> list[Node]:
        return [node for node in self.nodes if node.service == service]

    @property
    def urls(self) -> list[str]:
        """Addresses of the shims."""
        return [f"http://{node.target}" for node in self.of("http_shim")]

    async def leaks(self) -> list[str]:
        """Wait until no client is left; return the engines that still hold sequences or blocks."""
        held = []
        for node in self.of("engine"):
            async with connect(node.target) as channel:
                control = EngineControlServiceStub(channel)
                load = engine_pb2.Load(running_sequences=1)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_READY_SECONDS):
                        while not _is_idle(load):
                            load = (await control.GetLoad(engine_pb2.GetLoadRequest())).load
                            await asyncio.sleep(_POLL_SECONDS)
            if not _is_idle(load):
                held.append(f"{node.name}: {load}")
        return held


def _is_idle(load: engine_pb2.Load) -> bool:
    sequences = load.running_sequences + load.waiting_sequences
    return not sequences and load.free_blocks == load.total_blocks


@asynccontextmanager
async def running_fleet(
    model: Path, logs: Path, engines: int = 4, kv_memory: str = "64MiB"
) -> AsyncIterator[Fleet]:
    """Run `engines` engines, and two of each other service. Yield when all serve."""
    ports = iter(free_ports(engines + 6))
    checkpoint = ("--model", str(model), "--lost-seconds", _LOST_SECONDS)
    few = ("--dtype", "float32", "--kv-memory", kv_memory, "--threads", "1")
    grammars = [Node("grammar", i, next(ports), ("--model", str(model)), logs) for i in range(2)]
    grammar = ("--grammar", ",".join(node.target for node in grammars))
    nodes = list(grammars)
    links = []
    for number in range(engines):
        engine = Node("engine", number, next(ports), (*checkpoint, *few, *grammar), logs)
        nodes.append(engine)
        links.append(Link(engine.name, engine.target))
    for link in links:
        await link.start()
    targets = ("--engine", ",".join(link.target for link in links), "--engine-wait", "120")
    tokenizers = [
        Node("tokenizer", i, next(ports), (*checkpoint, *targets), logs) for i in range(2)
    ]
    behind = ("--tokenizer", ",".join(node.target for node in tokenizers))
    shims = [
        Node("http_shim", i, next(ports), (*behind, "--lost-seconds", _LOST_SECONDS), logs)
        for i in range(2)
    ]
    fleet = Fleet([*nodes, *tokenizers, *shims], links)
    try:
        for node in fleet.nodes:
            await node.start()
        for node in fleet.nodes:
            await node.until_ready()
        yield fleet
    finally:
        for node in reversed(fleet.nodes):
            await node.stop()
        for link in links:
            await link.stop()
