"""Logs as JSON lines on stderr, each with the ids of its request."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

__all__ = ["configure", "failure", "request_fields", "request_id", "traceparent"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
traceparent: ContextVar[str] = ContextVar("traceparent", default="")
"""The trace context of the caller (https://www.w3.org/TR/trace-context); empty: none"""

_QUOTING = frozenset({"INVALID_GRAMMAR", "TEMPLATE_REFUSED"})
"""Reasons whose messages quote what the client wrote"""
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
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def request_fields(request_id: str, traceparent: str) -> dict[str, str]:
    """Return the log fields that identify a request, without empty ones."""
    _, _, rest = traceparent.partition("-")
    fields = {"request_id": request_id, "trace_id": rest.partition("-")[0]}
    return {key: value for key, value in fields.items() if value}


def failure(log: logging.Logger, reason: str, error: str) -> dict[str, str]:
    """Return the log fields of a failed request.

    A message that quotes the client's input is logged at level debug only.
    """
    if reason in _QUOTING and not log.isEnabledFor(logging.DEBUG):
        return {"reason": reason}
    return {"reason": reason, "error": error}


def configure(service: str, level: str) -> None:
    """Log all records of `level` and above to stderr as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
