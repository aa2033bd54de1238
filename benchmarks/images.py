"""Time to encode an image, and what it costs running streams.

    python -m benchmarks.images --model ~/.cache/tokenwire-bench/models/bench-llava

The benchmark starts the four services. Streams of text run without images, then beside a client
that sends one new image after another.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from PIL import Image

from benchmarks import CACHE
from benchmarks.peers import Tokenwire
from benchmarks.processes import free_port, running
from benchmarks.results import RESULTS, Machine, now, save
from benchmarks.tables import markdown

__all__ = ["main"]

STREAMS = (1, 8)
SECONDS = 20.0
OUTPUT = 1_024
SIDE = 512
"""Pixels of an image's sides"""


@dataclass(frozen=True, slots=True)
class InterToken:
    """Inter-token times of the streams, in milliseconds."""

    streams: int
    images: bool
    count: int
    p50: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class ImageLatency:
    """Seconds from an image's arrival to its first token, beside this number of streams."""

    streams: int
    requests: int
    median_new: float
    median_cached: float
    """The same image and prompt again"""


@dataclass(frozen=True, slots=True)
class ImageReport:
    date: str
    machine: Machine
    model: str
    load_average: float
    inter_token: Sequence[InterToken]
    latency: Sequence[ImageLatency]


class Server:
    """The HTTP API of a running stack."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model

    async def stream(self, gaps: list[float], running: asyncio.Event) -> None:
        """Stream completions, one after another; append the seconds between their tokens.

        running: set with the first of them.
        """
        while True:
            prompt = [random.randrange(1_000, 9_000) for _ in range(64)]
            body = self._body(prompt=prompt, max_tokens=OUTPUT, stream=True)
            async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                last = None
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    read = time.perf_counter()
                    if last is not None:
                        gaps.append(read - last)
                        running.set()
                    last = read

    async def describe(self, image: str) -> float:
        """Send a request with an image; return the seconds until its first token."""
        began = time.perf_counter()
        body = self._body(prompt="<image>def", images=[image], max_tokens=1)
        answer = await self._http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return time.perf_counter() - began

    def _body(self, **fields: object) -> dict[str, object]:
        return {"model": self._model, "temperature": 0, "ignore_eos": True, **fields}


def new_image() -> str:
    """Return a data: URL of noise, which no cache holds."""
    pixels = random.randbytes(3 * 64 * 64)
    image = Image.frombytes("RGB", (64, 64), pixels).resize((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


@asynccontextmanager
async def _streaming(server: Server, streams: int) -> AsyncIterator[list[float]]:
    gaps: list[float] = []
    running = [asyncio.Event() for _ in range(streams)]
    tasks = [asyncio.create_task(server.stream(gaps, each)) for each in running]
    try:
        for each in running:
            await each.wait()
        gaps.clear()
        yield gaps
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(
    server: Server, streams: int, seconds: float
) -> tuple[list[InterToken], ImageLatency]:
    """Measure streams for `seconds` without images, and for `seconds` beside them."""
    new: list[float] = []
    async with _streaming(server, streams) as gaps:
        await asyncio.sleep(seconds)
        without, end = gaps.copy(), time.perf_counter() + seconds
        gaps.clear()
        while time.perf_counter() < end:
            image = new_image()
            new.append(await server.describe(image))
        beside = gaps.copy()
        cached = [await server.describe(image) for _ in range(3)]
    latency = ImageLatency(
        streams, len(new), _round(statistics.median(new)), _round(statistics.median(cached))
    )
    return [_times(streams, False, without), _times(streams, True, beside)], latency


def _times(streams: int, images: bool, gaps: list[float]) -> InterToken:
    gaps = sorted(gaps)
    figures = (gaps[len(gaps) // 2], gaps[int(len(gaps) * 0.99)], gaps[-1])
    p50, p99, most = (_round(1_000 * figure) for figure in figures)
    return InterToken(streams, images, len(gaps), p50, p99, most)


def _round(figure: float) -> float:
    return round(figure, 3)


def describe(report: ImageReport) -> str:
    """Return the report as two tables."""
    times = [["streams", "images", "p50, ms", "p99, ms", "most, ms", "p99 / p50"]]
    times += [
        [
            str(each.streams),
            "encoded" if each.images else "none",
            *(f"{figure:.1f}" for figure in (each.p50, each.p99, each.most)),
            f"{each.p99 / each.p50:.2f}",
        ]
        for each in report.inter_token
    ]
    images = [["streams", "images", "first token, new image, s", "the same again, s"]]
    images += [
        [
            str(each.streams),
            str(each.requests),
            f"{each.median_new:.2f}",
            f"{each.median_cached:.2f}",
        ]
        for each in report.latency
    ]
    return f"{markdown(times)}\n\n{markdown(images)}"


async def _measure_all(url: str, model: str, seconds: float) -> ImageReport:
    load_average = round(os.getloadavg()[0], 2)
    inter_token: list[InterToken] = []
    latency: list[ImageLatency] = []
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        server = Server(http, model)
        alone = [await server.describe(image) for image in (new_image(), *[new_image()] * 2)]
        latency.append(ImageLatency(0, 2, _round(alone[1]), _round(alone[2])))
        for streams in STREAMS:
            times, beside = await measure(server, streams, seconds)
            inter_token += times
            latency.append(beside)
    return ImageReport(now(), Machine.this(), model, load_average, inter_token, latency)


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.images",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, help="a vision-language checkpoint")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of each measurement")
    parser.add_argument("--tokenwire-args", default="", help="further flags of the engine")
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model = arguments.model.resolve()
    server = Tokenwire(arguments.tokenwire_args)
    launch = server.launch(server.install(arguments.cache), model, free_port())
    with running(launch, arguments.cache / "logs" / "images.log"):
        report = asyncio.run(_measure_all(launch.url, server.served_name(model), arguments.seconds))
    path = save(report, arguments.results, f"{report.date}-images-{report.model}")
    print(f"{describe(report)}\n\nwritten to {path}")


if __name__ == "__main__":
    main()
