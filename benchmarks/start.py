"""Seconds from the start of a server process until its first token.

    python -m benchmarks.start --model FILE.gguf [--runs 3] [ENGINE FLAGS]

The engine process alone, asked by gRPC, and `tokenwire serve`, asked by HTTP. Read the file once
before, so that it is in the page cache. Other flags go to the engine.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import grpc

from benchmarks.processes import free_port
from benchmarks.tables import markdown
from tokenwire.pb.engine.v1 import engine_pb2, engine_pb2_grpc
from tokenwire.pb.types.v1 import types_pb2

_DEADLINE = 120.0
_PAUSE = 0.01
"""Seconds between two attempts, as a client that retries at once makes them"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=3)
    arguments, flags = parser.parse_known_args()
    rows = [("", *(f"run {number}, s" for number in range(1, arguments.runs + 1)))]
    for name, start in (("engine", _engine), ("tokenwire serve", _stack)):
        times = [start(arguments.model, flags) for _ in range(arguments.runs)]
        rows.append((name, *(f"{seconds:.2f}" for seconds in times)))
    print(markdown(rows))


def _engine(model: Path, flags: Sequence[str]) -> float:
    port = free_port()
    command = ["-m", "services.engine", "--model", str(model), "--port", str(port), *flags]
    with grpc.insecure_channel(
        f"127.0.0.1:{port}",
        [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)],
    ) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        request = engine_pb2.GenerateRequest(
            prompts=[types_pb2.TokenIds(ids=[1, 2, 3])],
            stopping=types_pb2.StoppingParams(max_tokens=1),
        )

        def ask() -> bool:
            try:
                for answer in stub.Generate(request, timeout=_DEADLINE):
                    return answer is not None
            except grpc.RpcError:
                pass
            return False

        return _until_first(command, ask)


def _stack(model: Path, flags: Sequence[str]) -> float:
    port = free_port()
    command = ["-m", "tokenwire", "serve", "--model", str(model), "--port", str(port)]
    for name in ("tokenizer", "engine", "grammar"):
        command += [f"--{name}-port", str(free_port())]
    command.append(f"--engine-args={' '.join(flags)}")
    body = json.dumps({"model": "", "prompt": "def", "max_tokens": 1, "stream": True}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )

    def ask() -> bool:
        try:
            with urllib.request.urlopen(request, timeout=_DEADLINE) as answer:
                return bool(answer.readline().startswith(b"data:"))
        except (urllib.error.URLError, ConnectionError):
            return False

    return _until_first(command, ask)


def _until_first(command: Sequence[str], ask: Callable[[], bool]) -> float:
    """Return the seconds until `ask` has a token. Raises SystemExit if the process ends before."""
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not ask():
            if process.poll() is not None:
                raise SystemExit(f"{' '.join(command)} has ended with {process.returncode}")
            if time.perf_counter() - began > _DEADLINE:
                raise SystemExit(f"no token within {_DEADLINE:g} s")
            time.sleep(_PAUSE)
        return time.perf_counter() - began
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()


if __name__ == "__main__":
    main()
