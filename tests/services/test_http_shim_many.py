"""A shim over several tokenizer services: one that dies takes no new request with it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.shim import running_shim
from tests.stack import RunningService, Stack, running_service

BODY = {"model": "default", "prompt": "import", "max_tokens": 8, "temperature": 0}


@asynccontextmanager
async def two_tokenizers(stack: Stack, log: Path) -> AsyncIterator[list[RunningService]]:
    arguments = ("--model", str(stack.model), "--engine", stack.engine)
    async with (
        running_service("tokenizer", *arguments, log=log / "one") as one,
        running_service("tokenizer", *arguments, log=log / "two") as two,
    ):
        yield [one, two]


async def status(http: httpx.AsyncClient) -> dict[str, Any]:
    [model] = (await http.get("/status.json")).json()["models"]
    assert isinstance(model, dict)
    return model


async def test_new_requests_go_to_the_service_that_is_left(stack: Stack, tmp_path: Path) -> None:
    async with two_tokenizers(stack, tmp_path) as services:
        targets = ",".join(service.target for service in services)
        flags = ("--tokenizer", targets)
        async with (
            running_shim(*flags) as shim,
            httpx.AsyncClient(base_url=shim.url, timeout=120) as http,
        ):
            for _ in range(8):
                assert (await http.post("/v1/completions", json=BODY)).is_success
            counts = await status(http)
            assert counts["requests"]["ok"] == 8
            assert counts["completion_tokens"] == 64
            assert len(counts["engines"]) == 1
            services[0].process.kill()
            await services[0].process.wait()
            posts = [http.post("/v1/completions", json=BODY) for _ in range(8)]
            tokenized = [http.post("/tokenize", json={"prompt": "import"}) for _ in range(8)]
            for answer in await asyncio.gather(*posts, *tokenized):
                assert answer.status_code == 200, answer.text
            assert (await http.get("/ready")).status_code == 200


async def test_requests_spread_over_the_services(stack: Stack, tmp_path: Path) -> None:
    async with two_tokenizers(stack, tmp_path) as services:
        flags = ("--tokenizer", ",".join(service.target for service in services))
        async with (
            running_shim(*flags) as shim,
            httpx.AsyncClient(base_url=shim.url, timeout=120) as http,
        ):
            long = BODY | {"max_tokens": 200, "ignore_eos": True}
            posts = [http.post("/v1/completions", json=long) for _ in range(16)]
            for answer in await asyncio.gather(*posts):
                assert answer.is_success
        for service in services:
            assert service.log.read_text().count('"message": "completion ok"') == 8


@pytest.mark.parametrize("target", ["nowhere", "host:0", ","])
async def test_unusable_target_ends_the_shim_with_a_sentence(target: str) -> None:
    with pytest.raises(AssertionError, match="--tokenizer must"):
        async with running_shim("--tokenizer", target):
            pass
