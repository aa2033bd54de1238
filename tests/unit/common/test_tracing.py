"""Start of traces: refusals in one sentence."""

import sys

import pytest

from services.common import tracing
from services.common.settings import StartupError


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4317", "localhost", "grpc://collector:4317"])
def test_endpoint_without_http_scheme_is_refused(endpoint: str) -> None:
    """The SDK would use TLS, and fail at each export only."""
    with (
        pytest.raises(StartupError, match=r"URL such as http://127\.0\.0\.1:4317"),
        tracing.exporting("engine", endpoint),
    ):
        pass


def test_other_protocol_than_grpc_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector's port for HTTP would get gRPC, and no span would ever arrive."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with (
        pytest.raises(StartupError, match="protocol grpc, not 'http/protobuf'"),
        tracing.exporting("engine", "http://127.0.0.1:4318"),
    ):
        pass


def test_endpoint_without_the_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    for name in ("services.common.span_exporter", "opentelemetry"):
        monkeypatch.setitem(sys.modules, name, None)
    with (
        pytest.raises(StartupError, match=r"pip install .*opentelemetry-sdk"),
        tracing.exporting("engine", ""),
    ):
        pass


def test_span_hands_on_the_callers_context_without_an_endpoint() -> None:
    """Services that do trace stay connected across one that does not."""
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with tracing.exporting("engine", ""):
        span = tracing.start("name", caller, "request")
    assert span.traceparent == caller
    assert not span.is_recording
