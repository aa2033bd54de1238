"""Runs the four services of one machine as processes: starts, watches and stops them together."""

import asyncio
import contextlib
import json
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tokenwire.health import is_ready, is_serving

__all__ = ["Layout", "ServeError", "Service", "embedded_checkpoint", "plan", "supervise"]

_POLL_SECONDS = 0.1
_CUT_SECONDS = 5.0  # what a service gets beyond its grace before it is killed
_METRICS_OFFSET = 1000
_CHECKPOINTS = Path(__file__).resolve().parent.parent / "models"
_LIBRARY_LOG = re.compile(r"[IW]\d{4} ")  # of grpc, where nothing is wrong
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class ServeError(Exception):
    """The stack can't start, or can't go on. The message is one sentence; `exit_code` 2 or 1."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What is to be served, and where."""

    host: str = "127.0.0.1"
    port: int = 8000
    tokenizer_port: int = 50051
    engine_port: int = 50052
    grammar_port: int = 50053
    model: Path | None = None
    """Directory of a checkpoint; None = the embedded one"""
    dtype: str = "auto"
    engine_args: str = ""
    """Further flags of the engine, as on a shell's command line"""
    open: bool = False
    """Allow a host beyond loopback without API keys"""
    grace: float = 30.0
    """Seconds that running requests get when the stack stops"""
    log_dir: Path | None = None
    """A file per service there, instead of stderr"""


@dataclass(frozen=True, slots=True)
class Service:
    """One process: `python -m services.NAME ARGUMENTS`."""

    name: str
    arguments: tuple[str, ...]
    target: str
    """host:port that answers once it serves"""


def plan(layout: Layout) -> tuple[Service, ...]:
    """The services in the order of the pipeline, left to right. Raises ServeError."""
    model = str(_checkpoint(layout.model))
    try:
        engine_args = shlex.split(layout.engine_args)
    except ValueError as error:
        raise ServeError(f"Can't read the engine's arguments: {error}.") from None
    near = _reachable(layout.host)
    shim, tokenizer = _address(near, layout.port), _address(near, layout.tokenizer_port)
    engine, grammar = _address(near, layout.engine_port), f"127.0.0.1:{layout.grammar_port}"
    listen = ("--host", layout.host, "--port")
    grace = ("--grace", f"{layout.grace:g}")
    at_tokenizer = (*listen, str(layout.tokenizer_port), *grace)
    at_engine = (*listen, str(layout.engine_port), *grace)
    at_grammar = ("--host", "127.0.0.1", "--port", str(layout.grammar_port), *grace)
    beyond = ("--open",) if layout.open else ()
    return (
        Service(
            "http_shim",
            (*listen, str(layout.port), "--tokenizer", tokenizer, *grace, *beyond),
            shim,
        ),
        Service("tokenizer", (*at_tokenizer, "--model", model, "--engine", engine), tokenizer),
        Service(
            "engine",
            (
                *at_engine,
                "--model",
                model,
                "--dtype",
                layout.dtype,
                "--grammar",
                grammar,
                *engine_args,
            ),
            engine,
        ),
        Service("grammar", (*at_grammar, "--model", model), grammar),
    )


async def supervise(layout: Layout) -> None:
    """Start the stack, say where it is, and keep it until SIGINT or SIGTERM; a second one kills.

    Raises ServeError when it can't start, when one of its processes ends, or when one had to be
    killed at the end.
    """
    services = plan(layout)
    _require_free_ports(layout)
    signals = _Signals()
    began = time.monotonic()
    processes: list[_Process] = []
    try:
        for service in services:
            process = await _Process.start(service, _sink(service, layout.log_dir))
            processes.append(process)
        deaths = [asyncio.ensure_future(process.wait()) for process in processes]
        ready = asyncio.ensure_future(_wait_until_ready(services))
        ends = [signals.stop, *deaths]
        await asyncio.wait([ready, *ends], return_when=asyncio.FIRST_COMPLETED)
        is_up = ready.done()
        if is_up:
            ready.result()
            seconds = time.monotonic() - began
            print(
                f"Tokenwire serves http://{services[0].target} (up in {seconds:.1f} s)", flush=True
            )
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if not signals.stop.done():
            raise await _death(processes, is_up)
    finally:
        clean = [await process.stop(layout.grace + _CUT_SECONDS, signals) for process in processes]
    if not all(clean):
        raise ServeError("Not every service stopped by itself.", exit_code=1)


class _Signals:
    """SIGINT and SIGTERM: the first asks to stop, the second to hurry."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = loop.create_future()
        self.hurry: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        for future in (self.stop, self.hurry):
            if not future.done():
                future.set_result(None)
                return


class _Process:
    """A running service."""

    def __init__(self, service: Service, process: asyncio.subprocess.Process) -> None:
        self.service = service
        self._last_sentence, self._last_is_error = "", False
        self._process = process
        self._output: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, service: Service, sink: IO[bytes]) -> "_Process":
        # on a terminal a service sees a terminal too, and shows its progress
        source, stderr = os.openpty() if sink.isatty() else os.pipe()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", f"services.{service.name}", *service.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            process_group=0,  # Ctrl-C is the supervisor's; it stops them in order
            preexec_fn=_die_with_parent,
        )  # fmt: skip
        os.close(stderr)
        running = cls(service, process)
        running._forward(source, sink)
        return running

    def _forward(self, source: int, sink: IO[bytes]) -> None:
        """Copy what the service says, in whole lines."""
        loop = asyncio.get_running_loop()
        rest = b""

        def on_readable() -> None:
            nonlocal rest
            try:
                chunk = os.read(source, 1 << 16)
            except OSError:  # how a terminal says that the other end is closed
                chunk = b""
            cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
            if chunk and not cut:
                rest += chunk
                return
            whole, rest = rest + chunk[:cut], chunk[cut:]
            self._remember(whole)
            sink.write(whole)
            sink.flush()
            if not chunk:
                loop.remove_reader(source)
                os.close(source)
                if sink is not sys.stderr.buffer:
                    sink.close()
                self._output.set_result(None)

        loop.add_reader(source, on_readable)

    def _remember(self, output: bytes) -> None:
        """Keep the last sentence that may explain an end: an error, else whatever came last."""
        for line in _plain(output).splitlines():
            if line.strip():
                sentence, is_error = _sentence(line.strip())
                if is_error or not self._last_is_error:
                    self._last_sentence, self._last_is_error = sentence, is_error

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> None:
        """Until it has ended."""
        await self._process.wait()

    async def last_words(self) -> str:
        """Why it ended, in the words of its log."""
        with contextlib.suppress(TimeoutError):  # a child of its own may hold the pipe open
            await asyncio.wait_for(asyncio.shield(self._output), 1.0)
        return self._last_sentence

    async def stop(self, seconds: float, signals: _Signals) -> bool:
        """SIGTERM, and SIGKILL when the time is over or the user is. Whether it ended by itself."""
        by_itself = True
        if self.returncode is None:
            self._process.terminate()
            ended: asyncio.Future[Any] = asyncio.ensure_future(self._process.wait())
            ends = [ended, signals.hurry]
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                by_itself = False
                _say(f"{self.service.name} still ran and was killed")
                self._process.kill()
            await ended
        await self.last_words()
        return by_itself


async def _wait_until_ready(services: Sequence[Service]) -> None:
    """Until every gRPC service is SERVING and the shim's /ready answers 200."""
    shim, *others = services
    for service in reversed(others):
        await _until(is_serving, service.target)
    await _until(is_ready, f"http://{shim.target}/ready")


async def _until(probe: Callable[[str], Awaitable[bool]], where: str) -> None:
    while not await probe(where):  # noqa: ASYNC110 - another process has no event to wait for
        await asyncio.sleep(_POLL_SECONDS)


def _sink(service: Service, log_dir: Path | None) -> IO[bytes]:
    """Where a service's log goes."""
    if log_dir is None:
        return sys.stderr.buffer
    log_dir.mkdir(parents=True, exist_ok=True)
    return (log_dir / f"{service.name}.log").open("ab")


async def _death(processes: Sequence[_Process], was_up: bool) -> ServeError:
    """Which process ended, and why."""
    dead = next(process for process in processes if process.returncode is not None)
    code = dead.returncode or 0
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    words = await dead.last_words()
    if code == -signal.SIGKILL:
        words = "it was killed from outside, perhaps because memory ran out."
    if not was_up and code == 2 and words.startswith(f"{dead.service.name}: "):
        return ServeError(words)
    return ServeError(f"{dead.service.name} ended with {how}: {words or 'it said nothing.'}", 1)


def _checkpoint(model: Path | None) -> Path:
    """The directory to serve; ServeError when it holds no checkpoint."""
    if model is not None:
        if not model.is_dir():
            raise ServeError(f"The model directory {model} does not exist.")
        if not (model / "config.json").is_file():
            raise ServeError(f"The model directory {model} holds no config.json.")
        return model.resolve()
    return embedded_checkpoint()


def embedded_checkpoint() -> Path:
    """The checkpoint that comes with the repository; ServeError without it."""
    found = sorted(path.parent for path in _CHECKPOINTS.glob("*/config.json"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ServeError(f"{_CHECKPOINTS} must hold one checkpoint, not {names}; use --model.")
    return found[0]


def _require_free_ports(layout: Layout) -> None:
    """ServeError for the first port that something else listens on, or that is used twice."""
    grpc_ports = (
        ("tokenizer", layout.host, layout.tokenizer_port),
        ("engine", layout.host, layout.engine_port),
        ("grammar", "127.0.0.1", layout.grammar_port),
    )
    ports = [("HTTP", layout.host, layout.port), *grpc_ports]
    ports += [(f"{name} metrics", host, port + _METRICS_OFFSET) for name, host, port in grpc_ports]
    taken: dict[int, str] = {}
    for name, host, port in ports:
        if not 1 <= port <= 65535:
            raise ServeError(f"The {name} port must be between 1 and 65535, not {port}.")
        if port in taken:
            raise ServeError(f"The {taken[port]} port and the {name} port are both {port}.")
        taken[port] = name
        _require_free(name, host, port)


def _require_free(name: str, host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise ServeError(f"The host {host} is not known.") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ServeError(f"Can't use the {name} port {host}:{port}: {why}.") from None


def _reachable(host: str) -> str:
    """An address under which a server that listens on `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _sentence(line: str) -> tuple[str, bool]:
    """The message of a log line and whether it tells of an error; plain text (a traceback) does."""
    if not line.startswith("{"):
        return line, _LIBRARY_LOG.match(line) is None
    try:
        record = json.loads(line)
        return str(record["message"]), record["level"] in ("error", "critical")
    except (ValueError, KeyError):
        return line, False


def _plain(output: bytes) -> str:
    return _TERMINAL_CODES.sub("", output.decode("utf-8", "replace"))


def _say(what: str) -> None:
    print(f"tokenwire: {what}", file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    """In the child: SIGTERM when the supervisor is gone, so that nothing is left behind (Linux)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
