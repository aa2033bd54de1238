"""Fixture of a client of the running stack's tokenizer service."""

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.services.tokenizer.completion_client import Services
from tests.stack import Stack
from tokenwire.channel import connect
from tokenwire.pb.completion.v1.completion_pb2_grpc import CompletionServiceStub
from tokenwire.pb.tokenizer.v1.tokenizer_pb2_grpc import TokenizerServiceStub
from tokenwire.session import completion_session


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def services(stack: Stack) -> AsyncIterator[Services]:
    async with connect(stack.tokenizer) as channel:
        session = completion_session(channel)
        yield Services(
            CompletionServiceStub(channel),
            TokenizerServiceStub(channel),
            stack.tokenizer,
            stack.engine,
            session,
        )
        await session.close()
