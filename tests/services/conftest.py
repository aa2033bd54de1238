"""Fixtures: a running engine with a tiny model per test module, and a channel to it."""

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from tests.stack import RunningService, running_service
from tests.unit.engine.tiny import make_checkpoint
from tokenwire.channel import connect


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningService]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    arguments = ("--model", str(checkpoint), "--dtype", "float32", "--kv-memory", "64MiB")
    async with running_service("engine", *arguments, log=log) as service:
        yield service


@pytest_asyncio.fixture(loop_scope="session")
async def channel(engine: RunningService) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(engine.target) as channel:
        yield channel
