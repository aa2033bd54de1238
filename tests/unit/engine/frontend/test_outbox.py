"""What waits for a client: merged, in order, and never left behind."""

import asyncio
from functools import partial

import pytest

from services.engine.frontend import outbox as outbox_module
from services.engine.frontend.outbox import Outbox
from services.engine.messages import Token
from tokenwire.pb.engine.v1.engine_pb2 import SequenceFinished, SessionEvent


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pace so slow that waiting tokens leave only when something else lets them."""
    monkeypatch.setattr(outbox_module, "_PACE_SECONDS", 3600.0)


def put(outbox: Outbox[SessionEvent], position: int, handle: int = 1) -> None:
    token = Token(handle, 0, position, 100 + position, None)
    outbox.put_token(handle, token, partial(SessionEvent, handle=handle))


async def ids(outbox: Outbox[SessionEvent], timeout: float = 0) -> list[tuple[int, list[int]]]:
    """What can be taken: position and ids of each delta."""
    events = await outbox.take(timeout)
    return [(event.delta.position, list(event.delta.tokens.ids)) for event in events]


@pytest.mark.usefixtures("unhurried")
async def test_a_first_token_leaves_at_once() -> None:
    outbox: Outbox[SessionEvent] = Outbox()
    for handle in (1, 2):
        put(outbox, 0, handle)
        assert await ids(outbox) == [(0, [100])]


@pytest.mark.usefixtures("unhurried")
async def test_tokens_of_short_steps_go_together() -> None:
    outbox: Outbox[SessionEvent] = Outbox()
    put(outbox, 0)
    await outbox.take(60)
    taking = asyncio.ensure_future(ids(outbox, timeout=60))
    for position in (1, 2):
        put(outbox, position)
        await asyncio.sleep(0)
        assert not taking.done()
    put(outbox, 0, handle=2)
    assert await taking == [(1, [101, 102]), (0, [100])]


async def test_silence_ends_the_wait_again_and_again() -> None:
    outbox: Outbox[SessionEvent] = Outbox()
    for _ in range(2):
        assert await outbox.take(0.01) == []
    put(outbox, 0)
    assert await ids(outbox, timeout=60) == [(0, [100])]


@pytest.mark.usefixtures("unhurried")
async def test_an_end_takes_waiting_tokens_along() -> None:
    outbox: Outbox[SessionEvent] = Outbox()
    put(outbox, 0)
    await outbox.take(0)
    put(outbox, 1)
    outbox.put(SessionEvent(handle=1, finished=SequenceFinished(completion_tokens=2)))
    kinds = [event.WhichOneof("event") for event in await outbox.take(0)]
    assert kinds == ["delta", "finished"]


async def test_a_token_leaves_though_no_step_follows() -> None:
    outbox: Outbox[SessionEvent] = Outbox()
    put(outbox, 0)
    await outbox.take(0)
    put(outbox, 1)
    assert await ids(outbox, timeout=60) == [(1, [101])]
