"""The whole stack, as tests see it."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import SystemRandom

import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenwire.channel import connect
from tokenwire.pb.engine.v1.engine_pb2 import Load, WatchLoadRequest
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub

__all__ = [
    "MortalEngine",
    "RunningService",
    "Stack",
    "free_ports",
    "is_busy",
    "is_idle",
    "left_early",
    "loop_process",
    "metrics_of",
    "mortal_engine",
    "running_service",
    "watch_load",
]

_METRICS_OFFSET = 1000
_HANG_SECONDS = 60


@dataclass(frozen=True, slots=True)
class Stack:
    """Four processes that serve the embedded checkpoint in float32."""

    url: str
    """http://host:port of the shim"""
    tokenizer: str
    """host:port"""
    engine: str
    """host:port"""
    grammar: str
    """host:port"""
    model: Path
    """Directory of the checkpoint"""

    @property
    def model_id(self) -> str:
        return self.model.name


def _shuffled_ports() -> Iterator[int]:
    """Of every other thousand; the metrics' are in those between."""
    thousands = range(20_000, 32_000, 2 * _METRICS_OFFSET)
    ports = [port for first in thousands for port in range(first, first + _METRICS_OFFSET)]
    SystemRandom().shuffle(ports)
    return iter(ports)


_ports = _shuffled_ports()


def free_ports(count: int) -> list[int]:
    """Ports that are free on loopback, and so are those that their metrics take.

    None is given twice: it may be that nothing listens there yet. For the same reason other runs
    of the tests on this machine look in another order.
    """
    free = (port for port in _ports if _is_free(port) and _is_free(port + _METRICS_OFFSET))
    return list(islice(free, count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class RunningService:
    """One service as a process of its own."""

    target: str
    """host:port"""
    process: asyncio.subprocess.Process
    log: Path
    """What it wrote to stderr"""

    async def stop(self) -> int:
        """SIGTERM, and the exit code."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        return await self.process.wait()


@asynccontextmanager
async def running_service(
    name: str,
    *arguments: str,
    log: Path,
    launcher: Sequence[str] = (),
    port: int | None = None,
) -> AsyncIterator[RunningService]:
    """`python -m services.NAME` on that or a free port, from when it is healthy to its end.

    launcher: stands between python and -m.
    """
    if port is None:
        [port] = free_ports(1)
    command = (sys.executable, *launcher, "-m", f"services.{name}", "--port", str(port), *arguments)
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*command, stderr=stderr)
    service = RunningService(f"127.0.0.1:{port}", process, log)
    serving = asyncio.ensure_future(_serving(service.target))
    died = asyncio.ensure_future(process.wait())
    try:
        await asyncio.wait([serving, died], return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            raise AssertionError(f"{name} died: {log.read_text()}")  # noqa: ASYNC240
        yield service
    finally:
        serving.cancel()
        await service.stop()
        await died


class MortalEngine:
    """An engine in float32 that can be killed, and started again at the same address."""

    def __init__(self, model: Path) -> None:
        [port] = free_ports(1)
        self.target = f"127.0.0.1:{port}"
        self._command = [
            *(sys.executable, "-m", "services.engine", "--port", str(port), "--dtype", "float32"),
            *("--model", str(model), "--kv-memory", "64MiB"),
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Returns at once; whoever needs it waits for it."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stderr=asyncio.subprocess.DEVNULL
        )

    @property
    def pid(self) -> int:
        """Of the gRPC side."""
        assert self._process is not None
        return self._process.pid

    def terminate(self) -> None:
        """SIGTERM: it takes nothing new, and ends when nothing runs."""
        assert self._process is not None
        self._process.terminate()

    async def wait(self) -> None:
        """Returns when it is gone."""
        assert self._process is not None
        await self._process.wait()

    async def kill_loop(self) -> None:
        """SIGKILL to the process that computes; returns when the whole engine is gone."""
        os.kill(loop_process(self.pid), signal.SIGKILL)
        await self.wait()

    async def kill(self) -> None:
        """SIGKILL; returns when it is gone."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def mortal_engine(model: Path) -> AsyncIterator[MortalEngine]:
    """Started; ready when whoever needs it finds it so."""
    engine = MortalEngine(model)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.kill()


def loop_process(service: int) -> int:
    """The process of an engine that runs its step loop."""
    children = Path(f"/proc/{service}/task/{service}/children").read_text().split()
    [loop] = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    return int(loop)


async def watch_load(engine: str, *, until: Callable[[Load], bool]) -> Load:
    """The first load of the engine at "host:port" that is so, as soon as it tells."""
    async with connect(engine) as channel, asyncio.timeout(_HANG_SECONDS):
        control = EngineControlServiceStub(channel)
        async for answer in control.WatchLoad(WatchLoadRequest(interval_seconds=0.05)):
            if until(answer.load):
                return answer.load
    raise AssertionError("the watch ended")


@asynccontextmanager
async def left_early(engine: str, tokens: int) -> AsyncIterator[None]:
    """Inside, somebody asks for so many tokens and leaves: the engine must not go on to the end."""
    await watch_load(engine, until=is_idle)
    generated = "tokenwire_engine_generated_tokens_total"
    before = (await metrics_of(engine))[generated]
    yield
    await watch_load(engine, until=is_idle)
    after = (await metrics_of(engine))[generated]
    assert after - before < tokens, "all of it was generated"


async def metrics_of(service: str) -> dict[str, float]:
    """What the service at a target counts, by name and labels."""
    host, port = service.split(":")
    async with httpx.AsyncClient(timeout=_HANG_SECONDS) as client:
        answer = await client.get(f"http://{host}:{int(port) + _METRICS_OFFSET}/metrics")
    lines = [line for line in answer.text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def is_busy(load: Load) -> bool:
    """Something runs."""
    return load.running_sequences > 0


def is_idle(load: Load) -> bool:
    """Nothing runs or waits, and every block is free."""
    return (
        load.running_sequences == load.waiting_sequences == 0
        and load.free_blocks == load.total_blocks
    )


async def _serving(target: str) -> None:
    """Returns when the service says that it serves."""
    status = health_pb2.HealthCheckResponse.ServingStatus
    async with connect(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="")
        async for answer in stub.Watch(request, wait_for_ready=True):
            if answer.status == status.SERVING:
                return
