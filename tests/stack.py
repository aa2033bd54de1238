"""The whole stack, as tests see it."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from grpc_health.v1 import health_pb2, health_pb2_grpc

from tokenwire.channel import connect

__all__ = ["RunningService", "Stack", "free_ports", "running_service"]

_METRICS_OFFSET = 1000


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


def free_ports(count: int) -> list[int]:
    """Ports that are free on loopback, and so are those that their metrics take."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() % 10_000, 32_000):
        if all(_is_free(each) for each in (port, port + _METRICS_OFFSET)):
            found.append(port)
        if len(found) == count:
            return found
    raise RuntimeError("no free ports")


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
async def running_service(name: str, *arguments: str, log: Path) -> AsyncIterator[RunningService]:
    """`python -m services.NAME` on a free port, from when it is healthy to its end."""
    [port] = free_ports(1)
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", f"services.{name}", "--port", str(port), *arguments, stderr=stderr
        )
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


async def _serving(target: str) -> None:
    """Returns when the service says that it serves."""
    status = health_pb2.HealthCheckResponse.ServingStatus
    async with connect(target) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service="")
        async for answer in stub.Watch(request, wait_for_ready=True):
            if answer.status == status.SERVING:
                return
