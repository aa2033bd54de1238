"""The services of one model that embeds or scores texts, behind an HTTP address."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.services.shim import running_shim
from tests.stack import running_service

__all__ = ["TextStack", "running_text_stack"]


@dataclass(frozen=True)
class TextStack:
    """The addresses of a running stack."""

    client: httpx.AsyncClient
    """Client of the HTTP shim"""
    tokenizer: str
    """Target of the tokenizer service, for gRPC"""


@asynccontextmanager
async def running_text_stack(model: Path, *flags: str) -> AsyncIterator[TextStack]:
    """Run an engine in float32, a tokenizer service and a shim. flags: further ones of the engine.

    The logs lie beside the model.
    """
    of, logs = ("--model", str(model)), model.parent
    async with AsyncExitStack() as stack:
        computing = ("--dtype", "float32", "--device", "cpu", *flags)
        engine = await stack.enter_async_context(
            running_service("engine", *of, *computing, log=logs / "engine.log")
        )
        target = ("--engine", engine.target)
        tokenizer = await stack.enter_async_context(
            running_service("tokenizer", *of, *target, log=logs / "tokenizer.log")
        )
        shim = await stack.enter_async_context(running_shim("--tokenizer", tokenizer.target))
        client = httpx.AsyncClient(base_url=shim.url, timeout=60)
        yield TextStack(await stack.enter_async_context(client), tokenizer.target)
