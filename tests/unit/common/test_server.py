"""A gRPC service that can't start says why."""

import socket
import subprocess
import sys
from pathlib import Path


def test_a_port_in_use_is_reported_with_the_reason(embedded_model: Path) -> None:
    """gRPC itself gives no reason."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ended = subprocess.run(
            [sys.executable, "-m", "services.grammar", "--model", str(embedded_model),
             "--port", str(port)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )  # fmt: skip
    assert ended.returncode == 2
    said = f"grammar: Can't listen on 127.0.0.1:{port}: address already in use."
    assert said in ended.stderr.splitlines()
