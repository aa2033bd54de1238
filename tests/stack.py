"""Running services for tests: addresses, processes, load and metrics."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import SystemRandom

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenwire.channel import connect
from tokenwire.pb.engine.v1.engine_pb2 import Load, WatchLoadRequest
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineControlServiceStub
from tokenwire.tls import ClientTls

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
    "served_stack",
    "watch_load",
]

_METRICS_OFFSET = 1000
_BESIDE = (0, 10, _METRICS_OFFSET, _METRICS_OFFSET + 10)
"""Distances to the ports that a service uses with its own: of a second engine, and of metrics"""
_HANG_SECONDS = 60
_START_SECONDS = 240


@dataclass(frozen=True, slots=True)
class Stack:
    """Five processes that serve the embedded checkpoint in float32."""

    url: str
    """http://host:port of the shim"""
    tokenizer: str
    """host:port"""
    engine: str
    """host:port"""
    grammar: str
    """host:port"""
    jobs: str
    """host:port"""
    model: Path
    """Directory of the checkpoint"""

    @property
    def model_id(self) -> str:
        return self.model.name


def _shuffled_ports() -> Iterator[int]:
    """Return ports of every other thousand, shuffled. Metrics use the thousands between."""
    thousands = range(20_000, 32_000, 2 * _METRICS_OFFSET)
    ports = [port for first in thousands for port in range(first, first + _METRICS_OFFSET)]
    SystemRandom().shuffle(ports)
    return iter(ports)


_ports = _shuffled_ports()


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that are free, as are those that belong to them.

    No port is returned twice, because its server may not listen yet. For the same reason
    concurrent test runs on this machine search in different orders.
    """
    free = (port for port in _ports if all(_is_free(port + beside) for beside in _BESIDE))
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
    """File of its stderr"""

    async def stop(self) -> int:
        """Send SIGTERM. Return the exit code."""
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
    tls: ClientTls | None = None,
) -> AsyncIterator[RunningService]:
    """Run `python -m services.NAME` on `port` or a free one. Yield it when it is healthy.

    `launcher` is inserted between python and -m. `tls`: for health checks of a service with TLS.
    """
    if port is None:
        [port] = free_ports(1)
    command = (sys.executable, *launcher, "-m", f"services.{name}", "--port", str(port), *arguments)
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(*command, stderr=stderr)
    service = RunningService(f"127.0.0.1:{port}", process, log)
    serving = asyncio.ensure_future(_serving(service.target, tls))
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
    """A float32 engine that tests kill and start again at the same address."""

    def __init__(self, model: Path, *flags: str) -> None:
        [port] = free_ports(1)
        self.target = f"127.0.0.1:{port}"
        self._model = model
        self._command = [
            *(sys.executable, "-m", "services.engine", "--port", str(port), "--dtype", "float32"),
            *("--kv-memory", "64MiB", *flags, "--model"),
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, model: Path | None = None) -> None:
        """Start the process, with this model or its usual one, and don't wait until it is ready."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command, str(model or self._model), stderr=asyncio.subprocess.DEVNULL
        )

    @property
    def pid(self) -> int:
        """Process id of the gRPC side."""
        assert self._process is not None
        return self._process.pid

    def terminate(self) -> None:
        """Send SIGTERM: the engine refuses new requests, and ends when none runs."""
        assert self._process is not None
        self._process.terminate()

    async def wait(self) -> None:
        """Wait until the process has ended."""
        assert self._process is not None
        await self._process.wait()

    async def kill_loop(self) -> None:
        """Send SIGKILL to the step loop's process. Wait until the whole engine has ended."""
        os.kill(loop_process(self.pid), signal.SIGKILL)
        await self.wait()

    async def kill(self) -> None:
        """Send SIGKILL. Wait until the process has ended."""
        assert self._process is not None
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def mortal_engine(model: Path, *flags: str) -> AsyncIterator[MortalEngine]:
    """Start an engine and kill it at the end. It may not be ready yet when it is yielded."""
    engine = MortalEngine(model, *flags)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.kill()


@contextmanager
def served_stack(model: Path, logs: Path, *flags: str) -> Iterator[Stack]:
    """Run the embedded checkpoint `model` with `tokenwire serve`, as a user starts it."""
    http, tokenizer, engine, grammar, jobs = free_ports(5)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tokenwire", "serve",
            "--port", str(http),
            "--tokenizer-port", str(tokenizer),
            "--engine-port", str(engine),
            "--grammar-port", str(grammar),
            "--jobs-port", str(jobs),
            "--dtype", "float32",
            "--engine-args", "--kv-memory 128MiB",
            "--ollama",
            "--log-dir", str(logs),
            *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    watchdog = threading.Timer(_START_SECONDS, process.terminate)
    watchdog.start()
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    watchdog.cancel()
    if not line:
        tails = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(logs.iterdir())]
        raise AssertionError("\n".join([process.stderr.read(), *tails]))
    try:
        yield Stack(
            url=f"http://127.0.0.1:{http}",
            tokenizer=f"127.0.0.1:{tokenizer}",
            engine=f"127.0.0.1:{engine}",
            grammar=f"127.0.0.1:{grammar}",
            jobs=f"127.0.0.1:{jobs}",
            model=model,
        )
    finally:
        process.send_signal(signal.SIGTERM)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints


def loop_process(service: int) -> int:
    """Return the process id of an engine's step loop."""
    children = Path(f"/proc/{service}/task/{service}/children").read_text().split()
    [loop] = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    return int(loop)


async def watch_load(engine: str, *, until: Callable[[Load], bool]) -> Load:
    """Return the first load of the engine at "host:port" for which `until` is true."""
    async with connect(engine) as channel, asyncio.timeout(_HANG_SECONDS):
        control = EngineControlServiceStub(channel)
        async for answer in control.WatchLoad(WatchLoadRequest(interval_seconds=0.05)):
            if until(answer.load):
                return answer.load
    raise AssertionError("the watch ended")


@asynccontextmanager
async def left_early(engine: str, tokens: int) -> AsyncIterator[None]:
    """Assert that the engine generates fewer than `tokens` tokens for a client that disconnects.

    The `with` block sends the request and disconnects.
    """
    await watch_load(engine, until=is_idle)
    generated = "tokenwire_engine_generated_tokens_total"
    before = (await metrics_of(engine))[generated]
    yield
    await watch_load(engine, until=is_idle)
    after = (await metrics_of(engine))[generated]
    assert after - before < tokens, "the engine generated all tokens"


async def metrics_of(service: str) -> dict[str, float]:
    """Return the metrics of the service at "host:port", by name and labels except the model."""
    host, port = service.split(":")
    async with httpx.AsyncClient(timeout=_HANG_SECONDS) as client:
        answer = await client.get(f"http://{host}:{int(port) + _METRICS_OFFSET}/metrics")
    samples = (
        re.sub(r'model="[^"]*",?', "", answer.text)
        .replace(",}", "}")
        .replace("{}", "")
        .splitlines()
    )
    lines = [line for line in samples if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def is_busy(load: Load) -> bool:
    """Return True if a sequence runs."""
    return load.running_sequences > 0


def is_idle(load: Load) -> bool:
    """Return True if no sequence runs or waits, and every block is free."""
    return (
        load.running_sequences == load.waiting_sequences == 0
        and load.free_blocks == load.total_blocks
    )


async def _serving(target: str, tls: ClientTls | None) -> None:
    """Wait until the service's health check is SERVING."""
    status = health_pb2.HealthCheckResponse.ServingStatus
    async with connect(target, tls=tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="")
        while True:  # a service that ends before it serves ends the stream too
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for answer in stub.Watch(request, wait_for_ready=True):
                    if answer.status == status.SERVING:
                        return
            await asyncio.sleep(0.05)
