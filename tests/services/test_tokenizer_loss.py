"""Loss of a tokenizer service: its streams go on behind another one."""

import asyncio
import base64
import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file

from tests.services.shim import running_shim
from tests.stack import RunningService, Stack, free_ports, running_service
from tests.unit.engine.vision_checkpoints import png
from tests.vision import write_whole

# longer than what a client that does not read lets a shim fetch: no stream ends before the kill
LONG = {"model": "default", "max_tokens": 1_500, "ignore_eos": True, "temperature": 0.8, "seed": 7}
TEXT = LONG | {"prompt": "import", "stop": ["\0"]}
CHAT = LONG | {"messages": [{"role": "user", "content": "Say hello, and go on."}]}


@asynccontextmanager
async def two_tokenizers(
    model: Path, engine: str, log: Path
) -> AsyncIterator[tuple[list[RunningService], httpx.AsyncClient]]:
    """Run two tokenizer services and a shim in front of them; yield a client of the shim."""
    arguments = ("--model", str(model), "--engine", engine)
    async with (
        running_service("tokenizer", *arguments, log=log / "one") as one,
        running_service("tokenizer", *arguments, log=log / "two") as two,
        running_shim("--tokenizer", f"{one.target},{two.target}") as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=300) as http,
    ):
        yield [one, two], http


async def streamed(
    http: httpx.AsyncClient,
    asked: tuple[str, dict[str, Any]],
    on_first: Callable[[], Awaitable[None]],
) -> str:
    """Return the text of a whole stream."""
    path, body = asked
    text = ""
    async with http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200
        lines = [line async for line in _data(response, on_first)]
    assert lines.pop() == "[DONE]"
    for line in lines:
        for choice in json.loads(line)["choices"]:
            text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


async def _data(
    response: httpx.Response, on_first: Callable[[], Awaitable[None]]
) -> AsyncIterator[str]:
    is_first = True
    async for line in response.aiter_lines():
        if line.startswith("data: "):  # not a ping to a client that waits
            yield line.removeprefix("data: ")
            if is_first:
                await on_first()
            is_first = False


async def nothing() -> None:
    """Disturb no stream."""


async def test_streams_go_on_when_their_tokenizer_service_is_killed(
    stack: Stack, tmp_path: Path
) -> None:
    async with two_tokenizers(stack.model, stack.engine, tmp_path) as (services, http):
        asked = [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)] * 2
        calm = [await streamed(http, each, nothing) for each in asked[:2]] * 2
        begun = asyncio.Barrier(len(asked) + 1)

        async def begin() -> None:
            await begun.wait()

        running = [asyncio.ensure_future(streamed(http, each, begin)) for each in asked]
        ranked = TEXT | {"best_of": 2, "max_tokens": 300}
        whole = asyncio.ensure_future(http.post("/v1/completions", json=ranked))
        await begun.wait()
        services[0].process.kill()
        assert await asyncio.gather(*running) == calm
        assert (await whole).status_code == 200
        ended = services[1].log.read_text().count('"message": "completion ok"')
        assert ended > len(asked) // 2, "no stream has moved"


async def test_answer_that_cannot_continue_is_no_fault_of_its_client(
    embedded_model: Path, tmp_path: Path
) -> None:
    """The next service has an engine of other weights, which generate other tokens."""
    changed = tmp_path / "changed"
    shutil.copytree(embedded_model, changed)
    weights = load_file(changed / "model.safetensors")
    noisy = {name: tensor + 0.1 * tensor.std() for name, tensor in weights.items()}
    save_file(noisy, changed / "model.safetensors")
    [port] = free_ports(1)

    def engine(model: Path) -> AbstractAsyncContextManager[RunningService]:
        few = ("--model", str(model), "--dtype", "float32", "--kv-memory", "64MiB")
        return running_service("engine", *few, log=tmp_path / "engine")

    def tokenizer(model: Path, engine: str) -> AbstractAsyncContextManager[RunningService]:
        flags = ("--model", str(model), "--model-id", "m", "--engine", engine)
        return running_service("tokenizer", *flags, log=tmp_path / "tokenizer", port=port)

    body = LONG | {"prompt": "import", "mirostat_target": 16.0, "stream": True}
    async with (
        engine(embedded_model) as one,
        engine(changed) as two,
        tokenizer(embedded_model, one.target) as first,
        running_shim("--tokenizer", first.target, "--tokenizer-wait", "120") as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=300) as http,
        http.stream("POST", "/v1/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        for _ in range(40):
            await anext(lines)
        first.process.kill()
        await first.process.wait()
        async with tokenizer(changed, two.target):
            rest = [line async for line in lines if line]
    error = json.loads(rest[-1].removeprefix("data: "))["error"]
    assert error["code"] == "not_resumed"
    assert error["type"] != "invalid_request_error"


async def test_stream_about_an_image_goes_on(tmp_path: Path) -> None:
    """The shim sends the image again, because the new service has never seen it."""
    model = write_whole(tmp_path / "tiny-llava", "llava")
    arguments = ("--model", str(model), "--dtype", "float32", "--kv-memory", "64MiB")
    image = "data:image/png;base64," + base64.b64encode(png(40, 40)).decode()
    asked = ("/v1/completions", TEXT | {"prompt": "<image>def", "images": [image]})
    async with (
        running_service("engine", *arguments, log=tmp_path / "engine") as engine,
        two_tokenizers(model, engine.target, tmp_path) as (services, http),
    ):
        calm = await streamed(http, asked, nothing)
        begun = asyncio.Barrier(3)

        async def begin() -> None:
            await begun.wait()

        running = [asyncio.ensure_future(streamed(http, asked, begin)) for _ in range(2)]
        await begun.wait()
        services[0].process.kill()
        assert await asyncio.gather(*running) == [calm] * 2
