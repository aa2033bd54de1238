"""Process of one service: start, log, stop."""

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from services.common.exit_status import exit_status
from tokenwire.serving.launched_process import LaunchedProcess, launch
from tokenwire.serving.serve_options import LogPlace, ServeError
from tokenwire.serving.service import Service
from tokenwire.serving.service_log import FileLog, ServiceLog, StderrLog, report

__all__ = ["ServiceProcess"]

_LIBRARY_LOG = re.compile(r"[IW]\d{4} ")
"""Start of gRPC's info and warning lines"""
_SHARE = re.compile(r'"progress": ([01](?:\.\d+)?)\b')
_TERMINAL_CODES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class ServiceProcess:
    """Running process of a service."""

    def __init__(
        self, service: Service, process: asyncio.subprocess.Process, log: ServiceLog
    ) -> None:
        self.service = service
        self._log = log
        self._last_message, self._last_is_error = "", False
        self.on_progress: Callable[[float], None] = lambda _: None
        """Called with the share of a slow start that is done, from 0 to 1"""
        self._process = process
        self._output: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls,
        service: Service,
        logs: LogPlace | None,
        stderr_log: StderrLog,
        listener: socket.socket | None = None,
    ) -> "ServiceProcess":
        """Start the service; log to a file in `logs`, or to stderr. Raises ServeError.

        The service serves `listener` if given, which stays open when the process ends.
        """
        log = stderr_log if logs is None else _file_log(service, logs)
        fds = () if listener is None else (listener.fileno(),)
        arguments = (*service.arguments, *(f"--fd={fd}" for fd in fds))
        launched = await launch(
            service.name,
            arguments,
            is_seen=logs is None and sys.stderr.isatty(),
            fds=fds,
            environment=service.environment,
        )
        return cls._of(service, launched, log)

    @classmethod
    def adopt(
        cls,
        service: Service,
        launched: LaunchedProcess,
        logs: LogPlace | None,
        stderr_log: StderrLog,
    ) -> "ServiceProcess":
        """Return the process of a service that has been launched before. Raises ServeError."""
        log = stderr_log if logs is None else _file_log(service, logs)
        return cls._of(service, launched, log)

    @classmethod
    def _of(cls, service: Service, launched: LaunchedProcess, log: ServiceLog) -> "ServiceProcess":
        running = cls(service, launched.process, log)
        running._forward(launched.source)
        return running

    def reopen_log(self) -> None:
        """Open the log file again, if there is one and the service still writes to it."""
        if not self._output.done():
            self._log.reopen()

    def _forward(self, source: int) -> None:
        """Copy the service's output to its log, in whole lines."""
        loop = asyncio.get_running_loop()
        rest = b""

        def on_readable() -> None:
            nonlocal rest
            try:
                chunk = os.read(source, 1 << 16)
            except OSError:  # a terminal whose other end is closed raises
                chunk = b""
            cut = max(chunk.rfind(b"\n"), chunk.rfind(b"\r")) + 1
            if chunk and not cut:
                rest += chunk
                return
            whole, rest = rest + chunk[:cut], chunk[cut:]
            if whole:
                self._note_message(whole)
                self._write(whole)
            if not chunk:
                loop.remove_reader(source)
                os.close(source)
                self._log.close()
                self._output.set_result(None)

        loop.add_reader(source, on_readable)

    def _write(self, output: bytes) -> None:
        """Write to the log; on stderr without the sentence that the supervisor reports itself."""
        if not isinstance(self._log, StderrLog):
            self._log.put(output)
            return
        own = f"{self.service.name}: ".encode()
        lines = [line for line in output.splitlines(keepends=True) if not line.startswith(own)]
        if not lines:
            return
        self._log.put(b"".join(lines))
        if b"\r" in output.replace(b"\r\n", b"") or any(map(_is_progress, lines)):
            self._log.release()

    def _note_message(self, output: bytes) -> None:
        """Keep the last message that may explain an exit: the last error, else the last line."""
        for line in _plain(output).splitlines():
            if line.strip():
                if (progress := _progress(line)) is not None:
                    self.on_progress(progress)
                message, is_error = _message(line.strip())
                if is_error or not self._last_is_error:
                    self._last_message, self._last_is_error = message, is_error

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> None:
        """Wait until the process has ended."""
        await self._process.wait()

    async def last_message(self) -> str:
        """Return the log message that explains the exit; empty if there is none."""
        with contextlib.suppress(TimeoutError):  # a child process may hold the pipe open
            await asyncio.wait_for(asyncio.shield(self._output), 1.0)
        return self._last_message

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self, seconds: float, kill: "asyncio.Future[None]") -> bool:
        """Send SIGTERM, then SIGKILL after `seconds` or on `kill`; return False if killed."""
        by_itself = True
        if self.returncode is None:
            self._process.terminate()
            ended: asyncio.Future[Any] = asyncio.ensure_future(self._process.wait())
            ends = [ended, kill]
            await asyncio.wait(ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                by_itself = False
                report(f"{self.service.title} was still running and was killed")
                self._process.kill()
            await ended
        await self.last_message()
        return by_itself

    async def failure(self, was_up: bool) -> ServeError:
        """Return the error that describes the exit of a process that has ended."""
        code = self.returncode or 0
        how = exit_status(code)
        reason = await self.last_message()
        if code == -signal.SIGKILL:
            reason = "another process killed it, or the system ran out of memory."
        title = self.service.title
        if not was_up and code == 2 and reason.startswith(f"{self.service.name}: "):
            return ServeError(title + reason.removeprefix(self.service.name))
        return ServeError(f"{title} ended with {how}: {reason or 'it logged nothing.'}", 1)


def _is_progress(line: bytes) -> bool:
    """Return whether a log line says how much of a slow start is done."""
    return b'"progress": ' in line and line.startswith(b"{")


def _progress(line: str) -> float | None:
    """Return the share of a start that a log line says is done; None if it says none."""
    match = _SHARE.search(line) if line.startswith("{") else None
    return None if match is None else float(match[1])


def _file_log(service: Service, logs: LogPlace) -> FileLog:
    """Open the log of a service. Raises ServeError."""
    try:
        logs.folder.mkdir(parents=True, exist_ok=True)
        path = logs.folder / f"{service.log_name}.log"
        return FileLog(service.title, path, logs.most_bytes)
    except OSError as error:
        raise ServeError(f"No log can be written in {logs.folder}: {error.strerror}.") from None


def _message(line: str) -> tuple[str, bool]:
    """Return the message of a log line, and True for an error or plain text (a traceback)."""
    if not line.startswith("{"):
        return line, _LIBRARY_LOG.match(line) is None
    try:
        record = json.loads(line)
        return str(record["message"]), record["level"] in ("error", "critical")
    except (ValueError, KeyError):
        return line, False


def _plain(output: bytes) -> str:
    return _TERMINAL_CODES.sub("", output.decode("utf-8", "replace"))
