"""The engine as a service of its own: its start, and streams over gRPC."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile

from benchmarks.gpu.report import Figure
from benchmarks.processes import free_port
from services.common.network.health import is_serving
from tokenwire.channel import connect
from tokenwire.pb.engine.v1.engine_pb2 import GenerateRequest
from tokenwire.pb.engine.v1.engine_pb2_grpc import EngineServiceStub
from tokenwire.pb.types.v1.types_pb2 import SamplingParams, StoppingParams, TokenIds

__all__ = ["measure_service"]

_START_SECONDS = 300.0


def measure_service(
    path: Path, device: str, streams: Sequence[int], prompt: int, output: int, vocabulary: int
) -> Iterator[dict[str, Figure]]:
    """Yield the seconds until the service serves, and output tokens/s by number of streams.

    Of two runs the second. Raises RuntimeError with the service's last words if it does not start.
    """
    port = free_port()
    command = [sys.executable, "-m", "services.engine", "--model", str(path), "--device", device]
    command += ["--port", str(port), "--metrics-port", "-1"]
    if device == "cpu":
        command += ["--kv-memory", "64MiB"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    began = time.monotonic()
    # a file: a service whose log nobody reads stops once a pipe is full
    with (
        TemporaryFile("w+") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        try:
            if not asyncio.run(_until_serving(f"127.0.0.1:{port}", process)):
                process.kill()
                log.seek(0)
                raise RuntimeError(f"the engine did not start: {log.read()[-400:]}")
            yield {"what": "start of the service", "seconds": time.monotonic() - began}
            for count in streams:
                rate = 0.0
                for turn in range(2):
                    load = _prompts(f"{count} {turn}", count, prompt, vocabulary)
                    rate = asyncio.run(_rate(f"127.0.0.1:{port}", load, output))
                yield {"what": "closed, over gRPC", "streams": count, "tokens/s": rate}
        finally:
            process.terminate()


async def _until_serving(target: str, process: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        if await is_serving(target):
            return True
        await asyncio.sleep(0.2)
    return False


async def _rate(target: str, prompts: Sequence[Sequence[int]], output: int) -> float:
    async with connect(target) as channel:
        stub = EngineServiceStub(channel)

        async def tokens_of(prompt: Sequence[int]) -> int:
            request = GenerateRequest(
                prompts=[TokenIds(ids=prompt)],
                sampling=SamplingParams(temperature=0.0),
                stopping=StoppingParams(max_tokens=output, ignore_eos=True),
            )
            responses = [response async for response in stub.Generate(request)]
            return sum(len(each.delta.tokens.ids) for each in responses if each.HasField("delta"))

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*map(tokens_of, prompts)))
        return tokens / (time.perf_counter() - began)


def _prompts(seed: str, count: int, length: int, vocabulary: int) -> list[list[int]]:
    source = random.Random(seed)
    return [source.choices(range(vocabulary // 16, vocabulary), k=length) for _ in range(count)]
