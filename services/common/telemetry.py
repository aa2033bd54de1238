"""Prometheus metrics: the HTTP endpoint, the model's label, and the shared histogram buckets."""

import time
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import version
from typing import TypeVar
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Metric, start_http_server
from prometheus_client.registry import Collector

from services.common.network.addresses import address, why_unusable
from services.common.network.hosts import AllowedHosts
from services.common.settings import LAST_PORT, StartupError

__all__ = [
    "INTER_TOKEN_BUCKETS",
    "LATENCY_BUCKETS",
    "LOST_LOG_LINES",
    "describe_build",
    "serve_metrics",
]

LATENCY_BUCKETS = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
)  # fmt: skip
INTER_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip
_PAUSE_SECONDS = 0.5
Accepted = TypeVar("Accepted")


LOST_LOG_LINES = Counter("tokenwire_lost_log_lines_total", "Log lines that nobody read in time.")
_BUILD_INFO = Gauge("tokenwire_build_info", "The service.", ["service", "version", "kernels"])


def describe_build(service: str, kernels: str = "") -> None:
    """Publish the version of a service, and for the engine the kernels that it uses."""
    _BUILD_INFO.labels(service, version("tokenwire"), kernels).set(1)


def serve_metrics(host: str, port: int, model: str = "") -> None:
    """Serve /metrics in a thread, for hosts in `AllowedHosts`. Raises StartupError.

    `model`, if any, becomes a label of all of Tokenwire's metrics.
    """
    if port > LAST_PORT:
        raise StartupError(f"Can't serve metrics on port {port}; choose one with --metrics-port.")
    try:
        server, _ = start_http_server(port, addr=host, registry=_registry(model))
    except OSError as error:
        why = why_unusable(host, port) or str(error.strerror)
        raise StartupError(f"Can't serve metrics on {address(host, port)}: {why}.") from None
    server.get_request = _paced(server.get_request)  # type: ignore[method-assign]
    application = server.get_app()
    assert application is not None
    server.set_app(_guarded(application, AllowedHosts(host, ())))


def _paced(accept: Callable[[], Accepted]) -> Callable[[], Accepted]:
    """Return `accept` with a pause after a failure: the connection still waits for the next try."""

    def paced() -> Accepted:
        try:
            return accept()
        except OSError:  # no file descriptor is free
            time.sleep(_PAUSE_SECONDS)
            raise

    return paced


def _registry(model: str) -> CollectorRegistry:
    if not model:
        return REGISTRY
    registry = CollectorRegistry()
    registry.register(_LabelledMetrics(model))
    return registry


class _LabelledMetrics(Collector):
    """Metrics of the process. A scrape adds the model's label, so that counting stays cheap."""

    def __init__(self, model: str) -> None:
        self._label = {"model": model}

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            if metric.name.startswith("tokenwire_"):
                metric.samples = [
                    sample._replace(labels={**sample.labels, **self._label})
                    for sample in metric.samples
                ]
            yield metric


def _guarded(application: WSGIApplication, allowed: AllowedHosts) -> WSGIApplication:
    def guarded(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if allowed.allows(environ.get("HTTP_HOST", "localhost")):
            return application(environ, start_response)
        start_response("400 Bad Request", [("Content-Type", "text/plain")])
        return [b"The server does not accept the name in the Host header.\n"]

    return guarded
