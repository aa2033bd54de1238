"""Cost of the limits of API keys: a shim without keys, with its own counts, with counts in Redis.

    python -m benchmarks.limits

All shims stand before one tokenizer service, and are measured in turn. A request counts once and
reserves tokens and a stream. Needs the command `redis-server` and the extra `redis`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.processes import Launch, free_port, running
from benchmarks.tables import markdown
from services.common.accounts.key_file import add_key
from tokenwire.load.http_client import HttpClient

_BODIES = {
    "/v1/completions": {"prompt": "import", "max_tokens": 1, "temperature": 0},
    "/tokenize": {"prompt": "import"},
}
_MANY = 10**9
_LIMITS = {"requests_per_minute": _MANY, "tokens_per_minute": _MANY, "concurrent_streams": _MANY}


@contextmanager
def _shim(name: str, folder: Path, *flags: str) -> Iterator[str]:
    """Run a shim; yield its URL."""
    port = free_port()
    command = [sys.executable, "-m", "services.http_shim", "--port", str(port), *flags]
    launch = Launch(command, os.environ, f"http://127.0.0.1:{port}", "/ready")
    with running(launch, folder / f"{name}.log"):
        yield launch.url


@contextmanager
def _redis() -> Iterator[str]:
    """Run a Redis that writes no files; yield its URL."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait()


async def _latencies(client: HttpClient, path: str, requests: int, at_once: int) -> list[float]:
    """Return the seconds of each request."""
    body, left, taken = json.dumps(_BODIES[path]).encode(), iter(range(requests)), []

    async def send() -> None:
        for _ in left:
            began = time.perf_counter()
            answer = await client.post(path, body)
            taken.append(time.perf_counter() - began)
            assert answer.status == 200, answer.body

    await asyncio.gather(*(send() for _ in range(at_once)))
    return taken


async def _measure(arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as name, ExitStack() as processes:
        folder, http, text = Path(name), free_port(), free_port()
        keys = folder / "keys.json"
        keys.write_text(json.dumps({"tiers": {"default": _LIMITS}}))
        key = add_key(keys)
        ports = [f"--port={http}", f"--tokenizer-port={text}"]
        ports += [f"--engine-port={free_port()}", f"--grammar-port={free_port()}", "--no-jobs"]
        command = [sys.executable, "-m", "tokenwire", "serve", *ports]
        launch = Launch(command, os.environ, f"http://127.0.0.1:{http}", "/ready")
        processes.enter_context(running(launch, folder / "stack.log"))
        tokenizer = ("--tokenizer", f"127.0.0.1:{text}")
        own = (*tokenizer, "--keys", str(keys))
        shared = (*own, "--limits-url", processes.enter_context(_redis()))
        clients = {
            "no keys": HttpClient(processes.enter_context(_shim("none", folder, *tokenizer))),
            "own counts": HttpClient(processes.enter_context(_shim("own", folder, *own)), key=key),
            "Redis": HttpClient(processes.enter_context(_shim("redis", folder, *shared)), key=key),
        }
        rows = [["request", "at once", *clients]]
        cases = [(path, at_once) for path in _BODIES for at_once in (1, 32)]
        rows += [await _row(clients, *case, arguments) for case in cases]
        print(markdown(rows))
        for client in clients.values():
            client.close()


async def _row(
    clients: dict[str, HttpClient], path: str, at_once: int, arguments: argparse.Namespace
) -> list[str]:
    """Measure the shims in turn; return the medians of their rounds."""
    medians: dict[str, list[float]] = {name: [] for name in clients}
    rates: dict[str, list[float]] = {name: [] for name in clients}
    for _ in range(arguments.rounds):
        for name, client in clients.items():
            await _latencies(client, path, 2 * at_once, at_once)
            began = time.perf_counter()
            taken = await _latencies(client, path, arguments.requests, at_once)
            rates[name].append(len(taken) / (time.perf_counter() - began))
            medians[name].append(statistics.median(taken))
    cells = [
        f"{1e3 * statistics.median(medians[name]):.2f} ms, {statistics.median(rates[name]):.0f}/s"
        for name in clients
    ]
    return [path, str(at_once), *cells]


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each shim")
    parser.add_argument("--requests", type=int, default=300, help="of each measurement")
    asyncio.run(_measure(parser.parse_args()))


if __name__ == "__main__":
    main()
