"""Traces: one span per request and service, between the caller's span and the next service's.

Without an endpoint, spans record nothing and hand on the caller's context, and OpenTelemetry is not
imported.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from services.common.settings import StartupError
from services.common.span import Span
from tokenwire.extras import install_command

__all__ = ["current", "exporting", "start"]

_LOG = logging.getLogger("traces")
_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
current: ContextVar[Span] = ContextVar("span", default=Span(""))  # noqa: B039 - immutable
"""Span of the unary RPC that the task answers"""
_start: Callable[[str, str], Span] | None = None
"""Function that starts an exported span with a name and a parent; None = tracing is off"""


def start(name: str, parent: str, request_id: str) -> Span:
    """Start the span of a request.

    parent: the caller's traceparent; "" = the span begins a trace.
    """
    if _start is None:
        return Span(parent)
    span = _start(name, parent)
    span.set({"tokenwire.request_id": request_id})
    return span


@contextmanager
def exporting(service: str, endpoint: str) -> Iterator[None]:
    """Export the spans that start within the block; send the last ones at its end.

    service: the name of the service, without "tokenwire-".
    endpoint: URL of an OTLP collector; "" = that of the standard variables, or tracing is off.
    Raises StartupError.
    """
    global _start
    endpoint = endpoint or _first_value(_ENDPOINT_VARIABLES)
    if not endpoint:
        yield
        return
    _check(endpoint)
    try:
        from services.common.span_exporter import SpanExporter
    except ImportError:
        raise StartupError(
            f"Traces need OpenTelemetry, which is not installed: {install_command('otel')}"
        ) from None
    exporter = SpanExporter(service, endpoint)
    _LOG.info("traces go to %s", endpoint)
    _start = exporter.start
    try:
        yield
    finally:
        _start = None
        exporter.close()


def _first_value(variables: Sequence[str]) -> str:
    return next(filter(None, (os.environ.get(variable) for variable in variables)), "")


def _check(endpoint: str) -> None:
    if not endpoint.startswith(("http://", "https://")):
        raise StartupError(
            f"The endpoint of the traces must be a URL such as http://127.0.0.1:4317, "
            f"not {endpoint!r}."
        )
    protocol = _first_value(_PROTOCOL_VARIABLES)
    if protocol not in ("", "grpc"):
        raise StartupError(
            f"Traces are exported with the OTLP protocol grpc, not {protocol!r}; "
            f"change {_PROTOCOL_VARIABLES[1]}."
        )
