"""Memory of images in the HTTP shim, in front of a small vision-language model."""

import asyncio
import base64
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.services.shim import running_shim
from tests.stack import running_service
from tests.unit.engine.vision_checkpoints import png
from tests.vision import write_whole

HELD = 1_500_000
"""--max-held-bytes of the shim"""
FILE = png(400, 400, 1)
URL = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    model = write_whole(tmp_path_factory.mktemp("checkpoint") / "tiny-llava", "llava")
    logs = tmp_path_factory.mktemp("logs")
    async with AsyncExitStack() as running:

        async def start(name: str, *flags: str) -> str:
            arguments = ("--model", str(model), *flags)
            service = running_service(name, *arguments, log=logs / name)
            return (await running.enter_async_context(service)).target

        engine = await start("engine", "--dtype", "float32", "--kv-memory", "64MiB")
        yield await start("tokenizer", "--engine", engine)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def http(tokenizer: str) -> AsyncIterator[httpx.AsyncClient]:
    flags = ("--tokenizer", tokenizer, "--max-held-bytes", str(HELD), "--max-body-bytes", "900000")
    async with (
        running_shim(*flags) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as client,
    ):
        yield client


async def test_running_streams_hold_none_of_their_images(http: httpx.AsyncClient) -> None:
    """Otherwise a few long answers about images would refuse all others with 503."""
    count = 2 * HELD // len(FILE)
    assert count >= 4, "one request fits, all of them do not"
    assert 2 * len(URL) < HELD
    # more output than the buffers of a connection take, so that no stream ends
    body = {"prompt": "<image>", "images": [URL], "stream": True, "ignore_eos": True} | {
        "n": 8, "max_tokens": 1_500, "logprobs": 5,
    }  # fmt: skip
    lines: list[AsyncIterator[str]] = []  # an iterator that nobody holds ends its stream
    async with AsyncExitStack() as streams:
        for _ in range(count):
            answer = await streams.enter_async_context(
                http.stream("POST", "/v1/completions", json=body)
            )
            assert answer.status_code == 200, await answer.aread()
            lines.append(answer.aiter_lines())
            assert await anext(lines[-1])


async def test_command_line_sends_the_file_of_an_image(tokenizer: str, tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    path.write_bytes(FILE)
    asked = ("--image", str(path), "--image", str(path), "--target", tokenizer)
    for command in ("complete", "chat"):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tokenwire", command, "abc", *asked, "--max-tokens", "3",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, complaints = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0, complaints
