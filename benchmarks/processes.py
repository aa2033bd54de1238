"""Server processes: start, CPU time and memory, stop."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

__all__ = ["Launch", "ProcessTree", "ServerError", "free_port", "running"]


class ServerError(Exception):
    """A server ended, or was not ready in time."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The command of a server. It is ready when the path `ready` answers 200."""

    command: Sequence[str]
    environment: Mapping[str, str]
    url: str
    ready: str


@dataclass(frozen=True, slots=True)
class ServiceUse:
    """CPU seconds since the start, and resident bytes now (proportional set size)."""

    cpu_seconds: float
    resident_bytes: int


class ProcessTree:
    """A process and all its descendants."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)

    def cpu_seconds(self) -> float:
        """Return the user and system time, ended children included."""
        total = 0.0
        for process in self.members():
            try:
                spent = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += spent.user + spent.system + spent.children_user + spent.children_system
        return total

    def resident_bytes(self) -> int:
        """Return the resident memory. A page that several processes share counts once."""
        total = 0
        for process in self.members():
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        return total

    def by_service(self) -> dict[str, ServiceUse]:
        """Return the CPU time and memory of each of Tokenwire's services."""
        uses: dict[str, ServiceUse] = {}
        for process in self.members():
            try:
                times, memory = process.cpu_times(), process.memory_full_info().pss
                name = _service(process)
            except psutil.Error:
                continue
            before = uses.get(name, ServiceUse(0.0, 0))
            uses[name] = ServiceUse(
                before.cpu_seconds + times.user + times.system, before.resident_bytes + memory
            )
        return uses

    def members(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def free_port() -> int:
    """Return a free port of this machine's loopback address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert isinstance(port, int)
    return port


@contextmanager
def running(launch: Launch, log: Path, *, start_seconds: float = 300.0) -> Iterator[ProcessTree]:
    """Start a server, wait until it is ready, and stop it with all its descendants at the end.

    A SIGTERM to the benchmark stops the server too. Raises `ServerError` with the end of the log
    if the server does not become ready.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        server = subprocess.Popen(
            launch.command,
            env=dict(launch.environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    tree = ProcessTree(server.pid)
    try:
        _wait_until_ready(server, launch, log, start_seconds)
        yield tree
    finally:
        _stop(server, tree)


def _service(process: psutil.Process) -> str:
    """Return the service that a process runs, "engine's loop" or "others"."""
    command = process.cmdline()
    for part in command:
        if part.startswith("services."):
            return part.split(".")[1]
    if any("spawn_main" in part for part in command):
        return "engine's loop"
    return "others"


def _wait_until_ready(
    server: subprocess.Popen[bytes], launch: Launch, log: Path, seconds: float
) -> None:
    deadline = time.monotonic() + seconds
    while not _answers(launch.url + launch.ready):
        if server.poll() is not None:
            problem = f"ended with exit code {server.returncode} before it was ready"
        elif time.monotonic() > deadline:
            problem = f"was not ready after {seconds:.0f} s"
        else:
            time.sleep(0.5)
            continue
        ending = log.read_text(errors="replace").splitlines()[-20:]
        raise ServerError("\n".join([f"the server {problem}; {log} ends with:", *ending]))


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _stop(server: subprocess.Popen[bytes], tree: ProcessTree) -> None:
    members = tree.members()
    if server.poll() is None:
        server.send_signal(signal.SIGTERM)
    try:
        server.wait(timeout=30)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
    _, alive = psutil.wait_procs(members, timeout=5)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=5)
