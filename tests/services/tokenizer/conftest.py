"""Fixtures of the tokenizer service with an engine of the embedded checkpoint."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.services.tokenizer.completion_client import Services
from tests.stack import RunningService, running_service
from tokenwire.channel import connect
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.session import completion_session


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def engine(
    embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RunningService]:
    log = tmp_path_factory.mktemp("log") / "engine.log"
    arguments = ("--model", str(embedded_model), "--dtype", "float32", "--kv-memory", "64MiB")
    async with running_service("engine", *arguments, log=log) as service:
        yield service


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def services(
    engine: RunningService, embedded_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Services]:
    log = tmp_path_factory.mktemp("log") / "tokenizer.log"
    arguments = ("--model", str(embedded_model), "--engine", engine.target)
    async with (
        running_service("tokenizer", *arguments, log=log) as service,
        connect(service.target) as channel,
    ):
        session = completion_session(channel)
        yield Services(
            CompletionServiceStub(channel),
            TokenizerServiceStub(channel),
            service.target,
            engine.target,
            session,
        )
        await session.close()
