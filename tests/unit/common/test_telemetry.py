"""Metrics over HTTP are protected from DNS rebinding."""

import httpx

from services.common.telemetry import serve_metrics


def test_metrics_on_loopback_are_refused_under_other_names(unused_ports: list[int]) -> None:
    """Otherwise a web page whose name resolves to loopback could read them."""
    [port, *_] = unused_ports
    serve_metrics("127.0.0.1", port)
    url = f"http://127.0.0.1:{port}/metrics"
    assert "python_info" in httpx.get(url).text
    rebound = httpx.get(url, headers={"host": f"rebound.example:{port}"})
    assert (rebound.status_code, "python_info" in rebound.text) == (400, False)
