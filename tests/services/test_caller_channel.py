"""Channels that follow their certificates: no call is broken, no old connection stays."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tokenwire.caller_channel import CallerChannel

ECHO = "/test/Echo"


class Echo(grpc.GenericRpcHandler):
    """Answers each message with the caller's authorization."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        metadata: Any = handler_call_details.invocation_metadata
        given = dict(metadata).get("authorization", "").encode()

        async def answer(requests: AsyncIterator[bytes], _: object) -> AsyncIterator[bytes]:
            async for request in requests:
                yield request + b" " + given

        return grpc.stream_stream_rpc_method_handler(answer)


@asynccontextmanager
async def server() -> AsyncIterator[str]:
    running = grpc.aio.server()
    running.add_generic_rpc_handlers((Echo(),))
    port = running.add_insecure_port("127.0.0.1:0")
    await running.start()
    yield f"127.0.0.1:{port}"
    await running.stop(None)


@pytest.fixture
def opened() -> list[grpc.aio.Channel]:
    return []


def channel_to(target: str, file: Path, opened: list[grpc.aio.Channel]) -> CallerChannel:
    """Return a channel that opens another one, in plaintext, whenever the file changes."""

    def open_channel() -> grpc.aio.Channel:
        opened.append(grpc.aio.insecure_channel(target))
        return opened[-1]

    return CallerChannel(open_channel, [file], lambda: f"token-{file.read_text()}")


async def echo(call: Any, text: bytes) -> bytes:
    await call.write(text)
    answer: bytes = await call.read()
    return answer


async def until_opened(channel: CallerChannel, opened: list[grpc.aio.Channel], count: int) -> None:
    """Make calls until one has opened another channel; it looks at most once a second."""
    while len(opened) < count:
        call = channel.stream_stream(ECHO)()
        await echo(call, b"")
        call.cancel()
        await asyncio.sleep(0.05)


async def test_running_stream_outlives_the_change_and_new_calls_show_the_new_token(
    tmp_path: Path, opened: list[grpc.aio.Channel]
) -> None:
    file = tmp_path / "file"
    file.write_text("1")
    async with server() as target, channel_to(target, file, opened) as channel:
        rpc = channel.stream_stream(ECHO)
        running = rpc()
        assert await echo(running, b"a") == b"a Bearer token-1"
        file.write_text("2")
        await until_opened(channel, opened, 2)
        assert await echo(running, b"b") == b"b Bearer token-1"
        new = rpc(metadata=(("x-other", "kept"),))
        assert await echo(new, b"c") == b"c Bearer token-2"
        await running.done_writing()
        assert await running.read() is grpc.aio.EOF
        await running.code()
        while opened[0].get_state() is not grpc.ChannelConnectivity.SHUTDOWN:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert await echo(new, b"d") == b"d Bearer token-2"
