"""Slow clients get merged chunks, stalled ones are disconnected, silent streams get pings."""

import asyncio
from collections.abc import Sequence

import grpc
import pytest
from starlette.types import Message

from services.http_shim.backends.output_collector import OutputCollector
from services.http_shim.backends.submission import Submission
from services.http_shim.dialects.choices import AnswerOptions
from services.http_shim.dialects.completions.write import CompletionWriter
from services.http_shim.endpoints import stream_sender
from services.http_shim.endpoints.event_stream import EventStream
from services.http_shim.errors import ClientGoneError
from tests.unit.http_shim.synthetic import (
    ACCEPTED,
    USAGE,
    delta,
    exchange,
    feed,
    finished,
)
from tokenwire.errors import ServiceError


class Socket:
    """The client's end of a connection, which reads while `readable` is set."""

    def __init__(self, *, reads: bool = True) -> None:
        self.bodies: list[bytes] = []
        self.trailers: dict[bytes, bytes] | None = None
        self.arrived = asyncio.Event()
        self.readable = asyncio.Event()
        if reads:
            self.readable.set()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.trailers":
            self.trailers = dict(message["headers"])
        if message["type"] != "http.response.body":
            return
        await self.readable.wait()
        self.bodies.append(message["body"])
        self.arrived.set()

    async def next(self) -> bytes:
        await self.arrived.wait()
        self.arrived.clear()
        return self.bodies[-1]


class Credits(Submission):
    """Counts the granted credit."""

    def __init__(self) -> None:
        self.granted = 0

    def grant(self, tokens: int) -> None:
        self.granted += tokens


def begin(
    socket: Socket,
    credits_: Credits,
    *,
    choices: int = 1,
    extensions: Sequence[str] = (),
    stall_seconds: float = 30.0,
    ping_seconds: float = stream_sender.PING_SECONDS,
) -> tuple[OutputCollector, "asyncio.Task[None]"]:
    collector = OutputCollector()
    feed(collector, ACCEPTED)
    writer = CompletionWriter(AnswerOptions(choices_per_prompt=choices))
    asked = exchange()
    scope = {"exchange": asked, "extensions": {name: {} for name in extensions}}
    events = EventStream(collector, writer.events(ACCEPTED, "req_1"), asked, str)
    sending = stream_sender.send_stream(
        scope,
        socket.send,
        collector,
        credits_,
        events,
        stall_seconds=stall_seconds,
        ping_seconds=ping_seconds,
    )
    return collector, asyncio.ensure_future(sending)


async def test_deltas_are_merged_while_the_socket_is_full() -> None:
    socket = Socket(reads=False)
    collector, sending = begin(socket, Credits())
    feed(collector, delta("a", [1]))
    await asyncio.sleep(0)
    for text in "bcd":
        feed(collector, delta(text, [1]))
        await asyncio.sleep(0)
    feed(collector, finished(tokens=4), USAGE)
    socket.readable.set()
    await sending
    joined = b"".join(socket.bodies)
    assert joined.count(b"data: ") <= 3, "deltas were not merged"
    assert joined.endswith(b"data: [DONE]\n\n")


async def test_long_answers_yield_to_other_streams() -> None:
    """Otherwise echoes of megabytes would delay the tokens of all other streams."""
    socket = Socket()
    collector, sending = begin(socket, Credits(), choices=8)
    turns = 0

    async def bystander() -> None:
        nonlocal turns
        while not sending.done():
            turns += 1
            await asyncio.sleep(0)

    for index in range(8):
        feed(collector, delta("x" * 200_000, [1], index=index), finished(index))
    feed(collector, USAGE)
    await asyncio.gather(sending, bystander())
    assert turns >= 7, "the event loop must run between any two of the eight chunks"
    joined = b"".join(socket.bodies)
    assert joined.count(b"x" * 200_000) == joined.count(b'"finish_reason":"') == 8
    assert joined.endswith(b"data: [DONE]\n\n")


async def test_credit_follows_the_sent_tokens() -> None:
    """A stream never runs out of credit while its client reads, but credit is bounded."""
    socket, credits_ = Socket(), Credits()
    collector, sending = begin(socket, credits_)
    sent = 0
    while sent < 4 * stream_sender.CREDIT:
        feed(collector, delta("x" * 100, [1] * 100))
        sent += 100
        await socket.next()
        await asyncio.sleep(0)
        ahead = stream_sender.CREDIT + credits_.granted - sent
        assert stream_sender.CREDIT // 2 < ahead <= stream_sender.CREDIT
    feed(collector, finished(tokens=sent), USAGE)
    await sending


async def test_silent_stream_gets_a_ping() -> None:
    socket = Socket()
    collector, sending = begin(socket, Credits(), ping_seconds=0.01)
    assert await socket.next() == b": ping\n\n"
    feed(collector, finished(), USAGE)
    await sending


async def test_client_that_stops_reading_is_disconnected() -> None:
    collector, sending = begin(
        Socket(reads=False), Credits(), ping_seconds=0.01, stall_seconds=0.02
    )
    feed(collector, delta("a", [1]))
    with pytest.raises(ClientGoneError):
        await sending
    assert collector.is_open(), "the request must still be open, so that it is cancelled"


async def test_trailer_has_the_used_tokens_even_of_a_failed_stream() -> None:
    """A connection without trailers gets none."""
    ends = [(finished(), USAGE), ()]
    for end, used in zip(ends, (b"5", b"4"), strict=True):
        for extensions in (["http.response.trailers"], []):
            socket = Socket()
            collector, sending = begin(socket, Credits(), extensions=extensions)
            feed(collector, delta("a", [1, 2]), *end)
            if not end:
                collector.on_error(ServiceError(grpc.StatusCode.INTERNAL, "NOT_FINITE", "NaN"))
            await sending
            assert socket.trailers == ({b"x-tokens-used": used} if extensions else None)


async def test_disconnect_ends_the_stream() -> None:
    collector, sending = begin(Socket(), Credits())
    feed(collector, delta("a", [1]))
    collector.abandon()
    await sending
    assert collector.is_open()
