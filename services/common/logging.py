"""Logs as JSON lines on stderr, each with the ids of the request that it speaks of."""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime

__all__ = ["configure", "failure", "names_of", "request_id", "traceparent"]

request_id: ContextVar[str] = ContextVar("request_id", default="")
traceparent: ContextVar[str] = ContextVar("traceparent", default="")
"""The caller's place in a trace, as https://www.w3.org/TR/trace-context writes it; empty: none"""

_QUOTING = frozenset({"INVALID_GRAMMAR"})
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}


class _JsonFormatter(logging.Formatter):
    """One JSON object a line; `extra` becomes fields."""

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
        line |= names_of(request_id.get(), traceparent.get())
        line |= {key: value for key, value in vars(record).items() if key not in _STANDARD}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def names_of(request_id: str, traceparent: str) -> dict[str, str]:
    """The fields by which a request's lines are found, as far as it has them."""
    _, _, rest = traceparent.partition("-")
    named = {"request_id": request_id, "trace_id": rest.partition("-")[0]}
    return {key: value for key, value in named.items() if value}


def failure(log: logging.Logger, reason: str, error: str) -> dict[str, str]:
    """The fields that say why a request failed. A message that quotes what its client wrote, as
    that of a grammar does, is for debugging only."""
    if reason in _QUOTING and not log.isEnabledFor(logging.DEBUG):
        return {"reason": reason}
    return {"reason": reason, "error": error}


def configure(service: str, level: str) -> None:
    """Send every logger's lines to stderr as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
