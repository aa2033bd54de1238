"""A service as a process: started, listened to, stopped."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from pathlib import Path
from typing import IO, Any

from tokenwire.serving.exit_status import exit_status
from tokenwire.serving.stack_layout import ServeError, Service

__all__ = ["Process", "say"]

_LIBRARY_LOG = re.compile(r"[IW]\d{4} ")  # of grpc, where nothing is wrong
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Process:
    """A running service."""

    def __init__(self, service: Service, process: asyncio.subprocess.Process) -> None:
        self.service = service
        self._last_sentence, self._last_is_error = "", False
        self._log_is_lost = False
        self._process = process
        self._output: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls, service: Service, log_dir: Path | None, listener: socket.socket | None = None
    ) -> "Process":
        """Start it; its log goes to a file in the directory, or to stderr. Raises ServeError.

        listener: the socket that it serves, which stays open when it ends.
        """
        fds = () if listener is None else (listener.fileno(),)
        arguments = (*service.arguments, *(f"--fd={fd}" for fd in fds))
        sink = _sink(service, log_dir)
        # on a terminal a service sees a terminal too, and shows its progress
        source, stderr = os.openpty() if sink.isatty() else os.pipe()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-P", "-m", f"services.{service.name}", *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=stderr,
            stderr=stderr,
            pass_fds=fds,
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
            self._write(sink, whole)
            if not chunk:
                loop.remove_reader(source)
                os.close(source)
                if sink is not sys.stderr.buffer:
                    with contextlib.suppress(OSError):  # of what could not be written before
                        sink.close()
                self._output.set_result(None)

        loop.add_reader(source, on_readable)

    def _write(self, sink: IO[bytes], output: bytes) -> None:
        """Log it. A log that can't be written is no reason to stop: that is said once."""
        try:
            sink.write(output)
            sink.flush()
        except OSError as error:
            if not self._log_is_lost:
                self._log_is_lost = True
                say(f"the log of {self.service.title} can't be written: {error.strerror}")

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

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    async def stop(self, seconds: float, hurry: "asyncio.Future[None]") -> bool:
        """SIGTERM, and SIGKILL when the time is over or the user is. Whether it ended by itself."""
        by_itself = True
        if self.returncode is None:
            self._process.terminate()
            ended: asyncio.Future[Any] = asyncio.ensure_future(self._process.wait())
            ends = [ended, hurry]
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                by_itself = False
                say(f"{self.service.title} still ran and was killed")
                self._process.kill()
            await ended
        await self.last_words()
        return by_itself

    async def death(self, was_up: bool) -> ServeError:
        """How it ended, and why."""
        code = self.returncode or 0
        how = exit_status(code)
        words = await self.last_words()
        if code == -signal.SIGKILL:
            words = "it was killed from outside, perhaps because memory ran out."
        title = self.service.title
        if not was_up and code == 2 and words.startswith(f"{self.service.name}: "):
            return ServeError(title + words.removeprefix(self.service.name))
        return ServeError(f"{title} ended with {how}: {words or 'it said nothing.'}", 1)


def _sink(service: Service, log_dir: Path | None) -> IO[bytes]:
    """Where a service's log goes. Raises ServeError."""
    if log_dir is None:
        return sys.stderr.buffer
    name = re.sub(r"[^A-Za-z0-9._-]", "-", f"{service.name}-{service.model}".rstrip("-"))
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        return (log_dir / f"{name}.log").open("ab")
    except OSError as error:
        raise ServeError(f"No log can be written in {log_dir}: {error.strerror}.") from None


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


def say(what: str) -> None:
    """A line of our own among the logs."""
    with contextlib.suppress(OSError):  # nobody may read stderr any more
        print(f"tokenwire: {what}", file=sys.stderr, flush=True)


def _die_with_parent() -> None:
    """In the child: SIGTERM when the supervisor is gone, so that nothing is left behind (Linux)."""
    if sys.platform == "linux":
        import ctypes

        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)
