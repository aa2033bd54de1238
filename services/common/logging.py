"""Logs as JSON lines on stderr, each with the ids of its request."""

import json
import logging
import re
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

import grpc

from tokenwire.errors import ServiceError

__all__ = ["configure", "failure", "request_fields", "request_id", "traceparent"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
traceparent: ContextVar[str] = ContextVar("traceparent", default="")
"""The trace context of the caller (https://www.w3.org/TR/trace-context); empty: none"""

_QUOTING = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
"""Codes of errors whose messages may quote what the client wrote"""
_MOST_TEXT, _MOST_TRACEBACK = 1_000, 16_000
"""Characters of a field, and of the traceback of an exception"""
_FIELD = re.compile(r"\w*")
"""The name in front of a path, which no client chooses"""
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _JsonFormatter(logging.Formatter):
    """One JSON object per record, with `extra` as fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

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
        return json.dumps(line, ensure_ascii=False, default=str)


def request_fields(request_id: str, traceparent: str) -> dict[str, str]:
    """Return the log fields that identify a request, without empty ones."""
    _, _, rest = traceparent.partition("-")
    fields = {"request_id": request_id, "trace_id": rest.partition("-")[0]}
    return {key: value for key, value in fields.items() if value}


def failure(log: logging.Logger, error: ServiceError) -> dict[str, str]:
    """Return the log fields of a failed request.

    A message that may quote the client is logged at level debug only.
    """
    fields = {"reason": error.reason}
    if (field := _FIELD.match(error.field)) is not None and field[0]:
        fields["field"] = field[0]
    if error.code not in _QUOTING or log.isEnabledFor(logging.DEBUG):
        fields["error"] = error.message
    return fields


def _cut(value: object) -> object:
    """Return a value whose text, which a client may have chosen, has a sane length."""
    if isinstance(value, str) and len(value) > _MOST_TEXT:
        return f"{value[:_MOST_TEXT]}… ({len(value):,} characters)"
    return value


def configure(service: str, level: str) -> None:
    """Log all records of `level` and above to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
