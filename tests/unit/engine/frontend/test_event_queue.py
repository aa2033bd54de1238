"""Events that wait for a client are merged, kept in order, and always sent."""

import asyncio
from functools import partial

import pytest

from services.engine.frontend import event_queue
from services.engine.frontend.event_queue import EventQueue
from services.engine.messages import Token
from tokenwire.pb.engine.v1.engine_pb2 import SequenceFinished, SessionEvent


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the pace so slow that waiting tokens leave only with another event."""
    monkeypatch.setattr(event_queue, "_PACE_SECONDS", 3600.0)
    monkeypatch.setattr(event_queue, "_MOST_PACE_SECONDS", 3600.0)


def put(events: EventQueue[SessionEvent], position: int, handle: int = 1) -> None:
    token = Token(handle, 0, position, 100 + position, None)
    events.put_token(handle, token, partial(SessionEvent, handle=handle))


async def ids(events: EventQueue[SessionEvent], timeout: float = 0) -> list[tuple[int, list[int]]]:
    """Take the events; return position and ids of each delta."""
    taken = await events.take(timeout)
    return [(event.delta.position, list(event.delta.tokens.ids)) for event in taken]


@pytest.mark.usefixtures("unhurried")
async def test_first_token_is_sent_at_once() -> None:
    events: EventQueue[SessionEvent] = EventQueue()
    for handle in (1, 2):
        put(events, 0, handle)
        assert await ids(events) == [(0, [100])]


@pytest.mark.usefixtures("unhurried")
async def test_tokens_of_short_steps_are_merged() -> None:
    events: EventQueue[SessionEvent] = EventQueue()
    put(events, 0)
    await events.take(60)
    taking = asyncio.ensure_future(ids(events, timeout=60))
    for position in (1, 2):
        put(events, position)
        await asyncio.sleep(0)
        assert not taking.done()
    put(events, 0, handle=2)
    assert await taking == [(1, [101, 102]), (0, [100])]


async def test_each_wait_ends_after_its_timeout() -> None:
    events: EventQueue[SessionEvent] = EventQueue()
    for _ in range(2):
        assert await events.take(0.01) == []
    put(events, 0)
    assert await ids(events, timeout=60) == [(0, [100])]


@pytest.mark.usefixtures("unhurried")
async def test_finish_is_sent_together_with_waiting_tokens() -> None:
    events: EventQueue[SessionEvent] = EventQueue()
    put(events, 0)
    await events.take(0)
    put(events, 1)
    events.put(SessionEvent(handle=1, finished=SequenceFinished(completion_tokens=2)))
    kinds = [event.WhichOneof("event") for event in await events.take(0)]
    assert kinds == ["delta", "finished"]


async def test_token_is_sent_although_no_step_follows() -> None:
    events: EventQueue[SessionEvent] = EventQueue()
    put(events, 0)
    await events.take(0)
    put(events, 1)
    assert await ids(events, timeout=60) == [(1, [101])]


@pytest.mark.parametrize(
    ("streams", "step_seconds", "expected"),
    [
        (1, 0.004, [1, 1, 1, 1]),
        (1, 0.002, [0, 2, 0, 2]),
        (8, 0.002, [0, 0, 0, 4]),
        (100, 0.008, [0, 0, 3, 0]),
    ],
)
async def test_few_streams_get_each_token_as_it_is_made(
    monkeypatch: pytest.MonkeyPatch, streams: int, step_seconds: float, expected: list[int]
) -> None:
    """Tokens of one stream wait for 3 ms at most, and those of many streams for 24 ms."""
    now = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
    events: EventQueue[SessionEvent] = EventQueue()
    for handle in range(streams):
        put(events, 0, handle)
    await events.take(3600)
    sent = []
    for position in range(1, 5):
        now = step_seconds * position
        for handle in range(streams):
            put(events, position, handle)
        taking = asyncio.ensure_future(ids(events, timeout=3600))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        sent.append(len(taking.result()[-1][1]) if taking.done() else 0)
        taking.cancel()
    assert sent == expected
