"""Fixtures of all tests: the embedded checkpoint, free ports, one running stack."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.stack import Stack, free_ports
from tokenwire.serving.stack_layout import embedded_checkpoint

_START_SECONDS = 240

# A slow machine must not fail a property test. `settings.default` has fixed examples in CI.
settings.register_profile(
    "untimed", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")


@pytest.fixture
def unused_ports() -> list[int]:
    """Four free ports."""
    return free_ports(4)


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    return embedded_checkpoint()


@pytest.fixture(scope="session")
def stack(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One stack for the session, started by `tokenwire serve` as a user starts it."""
    logs = tmp_path_factory.mktemp("logs")
    http, tokenizer, engine, grammar = free_ports(4)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tokenwire", "serve",
            "--port", str(http),
            "--tokenizer-port", str(tokenizer),
            "--engine-port", str(engine),
            "--grammar-port", str(grammar),
            "--dtype", "float32",
            "--engine-args", "--kv-memory 512MiB",
            "--log-dir", str(logs),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    watchdog = threading.Timer(_START_SECONDS, process.terminate)
    watchdog.start()
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    watchdog.cancel()
    if not line:
        tails = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(logs.iterdir())]
        pytest.fail("\n".join([process.stderr.read(), *tails]))
    yield Stack(
        url=f"http://127.0.0.1:{http}",
        tokenizer=f"127.0.0.1:{tokenizer}",
        engine=f"127.0.0.1:{engine}",
        grammar=f"127.0.0.1:{grammar}",
        model=embedded_model,
    )
    process.send_signal(signal.SIGTERM)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 0, complaints
