"""Metrics over HTTP: protection from DNS rebinding, and a process without descriptors."""

import errno
import os
import socket
import socketserver
import time

import httpx
import pytest

from services.common.telemetry import serve_metrics


def test_metrics_on_loopback_are_refused_under_other_names(unused_ports: list[int]) -> None:
    """Otherwise a web page whose name resolves to loopback could read them."""
    [port, *_] = unused_ports
    serve_metrics("127.0.0.1", port)
    url = f"http://127.0.0.1:{port}/metrics"
    assert "python_info" in httpx.get(url).text
    rebound = httpx.get(url, headers={"host": f"rebound.example:{port}"})
    assert (rebound.status_code, "python_info" in rebound.text) == (400, False)


def test_connection_that_can_not_be_accepted_does_not_take_a_processor(
    unused_ports: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It stays in the queue of the socket, so each attempt fails at once, until one succeeds."""
    [port, *_] = unused_ports
    accept, failures, pauses = socketserver.TCPServer.get_request, 3, list[float]()

    def without_descriptors(server: socketserver.TCPServer) -> tuple[socket.socket, object]:
        nonlocal failures
        if failures:
            failures -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return accept(server)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", without_descriptors)
    monkeypatch.setattr(time, "sleep", pauses.append)
    serve_metrics("127.0.0.1", port)
    assert httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=60).status_code == 200
    assert len(pauses) == 3
    assert min(pauses) > 0
