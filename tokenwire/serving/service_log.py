"""Places of the services' output: stderr, or a log file for each service.

The supervisor only queues lines: a reader that stands still delays neither it nor a service.
"""

import json
import weakref
from functools import partial
from pathlib import Path
from typing import Protocol

from services.common.line_writer import LineWriter, write_to
from services.common.log_text import is_text, rendered, wants_colours
from tokenwire.serving.log_file import LogFile

__all__ = ["FileLog", "ServiceLog", "StderrLog", "flush_logs", "report"]

_STDERR = 2
_HELD_BYTES = 1 << 20


class ServiceLog(Protocol):
    """Place of a service's output."""

    def put(self, lines: bytes) -> None:
        """Queue whole lines."""

    def reopen(self) -> None:
        """Open the file again, after another program has moved it."""

    def close(self) -> None:
        """End with the service."""


class StderrLog:
    """stderr. Output may be held back until the services are known to be startable."""

    def __init__(self, log_format: str = "json", *, holds: bool = False) -> None:
        self._is_text = is_text(log_format, _STDERR)
        self._colours = self._is_text and wants_colours(_STDERR)
        self._held: list[bytes] | None = [] if holds else None
        self._held_bytes = 0

    def put(self, lines: bytes) -> None:
        """Queue whole lines, or hold them; JSON becomes text where people read it."""
        if self._is_text:
            lines = rendered(lines, colours=self._colours)
        if self._held is None:
            _stderr.put(lines)
            return
        self._held.append(lines)
        self._held_bytes += len(lines)
        if self._held_bytes > _HELD_BYTES:
            self.release()

    def release(self) -> None:
        """Write what was held, and from now on everything at once."""
        held, self._held = self._held or [], None
        for lines in held:
            _stderr.put(lines)

    def reopen(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: stderr is that of all services."""


class FileLog:
    """Log file of one service."""

    def __init__(self, title: str, path: Path, most_bytes: int) -> None:
        """Open the file. Raises OSError. title: the service's name in messages."""
        self._title = title
        self._file = LogFile(path, most_bytes)
        self._is_lost = False
        self._writer = _tracked(LineWriter(self._write, _notice))

    def put(self, lines: bytes) -> None:
        """Queue whole lines."""
        self._writer.put(lines)

    def reopen(self) -> None:
        """Open the file again once the lines before are written."""
        self._writer.call(self._reopen)

    def close(self) -> None:
        """Close the file once all is written."""
        self._writer.call(self._file.close)  # a network's file system reports errors late
        self._writer.close()

    def _write(self, lines: bytes) -> None:
        """Write lines. Report the first failure, and go on."""
        try:
            self._file.write(lines)
        except OSError as error:
            if not self._is_lost:
                self._is_lost = True
                report(f"the log of {self._title} can't be written: {error.strerror}")

    def _reopen(self) -> None:
        try:
            self._file.reopen()
        except OSError as error:
            report(f"the log of {self._title} can't be opened again: {error.strerror}")


def report(line: str) -> None:
    """Write a line of the supervisor to stderr."""
    _stderr.put(f"tokenwire: {line}\n".encode("utf-8", "backslashreplace"))


def flush_logs(seconds: float) -> None:
    """Wait until all logs are written, each for some seconds at most."""
    for writer in list(_writers):
        writer.flush(seconds)


def _notice(lost: int) -> bytes:
    message = f"{lost} log lines were lost: the log could not be written in time"
    return json.dumps({"level": "warning", "service": "tokenwire", "message": message}).encode() + (
        b"\n"
    )


def _tracked(writer: LineWriter) -> LineWriter:
    _writers.add(writer)
    return writer


_writers: "weakref.WeakSet[LineWriter]" = weakref.WeakSet()
_stderr = _tracked(LineWriter(partial(write_to, _STDERR), _notice))
