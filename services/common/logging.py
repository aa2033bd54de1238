"""Logs on stderr, as JSON lines or as text, each line with the ids of its request."""

import contextlib
import json
import logging
import os
import stat
import sys
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import partial

from services.common.line_writer import LineWriter, write_to
from services.common.log_text import is_text, record_text, wants_colours

__all__ = ["configure", "flush", "request_fields", "request_id", "traceparent"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
traceparent: ContextVar[str] = ContextVar("traceparent", default="")
"""The trace context of the caller (https://www.w3.org/TR/trace-context); empty: none"""

_MOST_TEXT, _MOST_TRACEBACK = 1_000, 16_000
"""Most characters of a field, and of the traceback of an exception"""
_FLUSH_SECONDS = 1.0
_LIBRARIES = (
    *("PIL", "accelerate", "asyncio", "charset_normalizer", "concurrent", "dill", "filelock"),
    *("fsspec", "grpc", "httpcore", "httpcore2", "httpx", "httpx2", "huggingface_hub"),
    *("markdown_it", "opentelemetry", "pypdf", "redis", "torch", "tqdm", "transformers", "triton"),
    *("urllib3", "uvicorn", "xformers"),
)
"""Loggers of other packages, which write nothing less severe than info: gRPC alone has ten lines
of level debug for each request"""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _Formatter(logging.Formatter):
    """One JSON object or one text per record, with `extra` as fields."""

    def __init__(self, service: str, *, is_text: bool, colours: bool) -> None:
        super().__init__()
        self._service = service
        self._is_text = is_text
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "message": record.getMessage(),
        }
        line |= request_fields(request_id.get(), traceparent.get())
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)[-_MOST_TRACEBACK:]
        line |= {key: _cut(value) for key, value in line.items() if key != "exception"}
        if self._is_text:
            return record_text(line, colours=self._colours)
        return json.dumps(line, ensure_ascii=False, default=str)


def request_fields(request_id: str, traceparent: str) -> dict[str, str]:
    """Return the log fields that identify a request, without empty ones."""
    _, _, rest = traceparent.partition("-")
    fields = {"request_id": request_id, "trace_id": rest.partition("-")[0]}
    return {key: value for key, value in fields.items() if value}


def _cut(value: object) -> object:
    """Return a value whose text, which a client may have chosen, has a sane length."""
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        return f"{value[:_MOST_TEXT]}… ({len(value):,} characters)"
    return value


def configure(
    service: str, level: str, log_format: str, on_lost: Callable[[], None] = lambda: None
) -> None:
    """Log all records of `level` and above to stderr; those of other packages from info upwards.

    log_format: "json", "text", or "auto" = text on a terminal and JSON elsewhere. on_lost: called
    for each lost line. A log that nobody reads loses lines instead of delaying a request.
    """
    _unblock_stderr()
    stderr = sys.stderr.fileno()
    text = is_text(log_format, stderr)
    formatter = _Formatter(service, is_text=text, colours=text and wants_colours(stderr))
    handler = _LineHandler(formatter, on_lost)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    if level == "debug":
        for library in map(logging.getLogger, _LIBRARIES):
            library.setLevel(max(library.level, logging.INFO))


def flush() -> None:
    """Wait until all lines are written, or for a second if stderr is not read.

    A process that ends by os._exit must call it.
    """
    for handler in logging.getLogger().handlers:
        handler.flush()


class _LineHandler(logging.Handler):
    """Handler that passes the lines to a thread that writes them."""

    def __init__(self, formatter: logging.Formatter, on_lost: Callable[[], None]) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._on_lost = on_lost
        self._writer = LineWriter(partial(write_to, sys.stderr.fileno()), self._notice)

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._writer.put(self._line(record)):
                self._on_lost()
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        self._writer.flush(_FLUSH_SECONDS)

    def _line(self, record: logging.LogRecord) -> bytes:
        return f"{self.format(record)}\n".encode("utf-8", "backslashreplace")

    def _notice(self, lost: int) -> bytes:
        fields = {"name": "log", "levelno": logging.WARNING, "levelname": "WARNING"}
        message = f"{lost} log lines were lost: stderr was not read in time"
        return self._line(logging.makeLogRecord({**fields, "msg": message, "lost_lines": lost}))


def _unblock_stderr() -> None:
    """Make writes to a pipe or terminal on stderr non-blocking, for all libraries.

    The descriptor is opened anew: the mode of an inherited one would change for other processes.
    """
    number = sys.stderr.fileno()
    kind = os.fstat(number).st_mode
    if stat.S_ISFIFO(kind) or os.isatty(number):
        with contextlib.suppress(OSError):  # another user's: writes of libraries may block
            flags = os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
            opened = os.open(f"/proc/self/fd/{number}", flags)
            os.dup2(opened, number)
            os.close(opened)
