"""Thread of a store: a call that waits for the database holds up no stream."""

import asyncio
import threading

import grpc
import pytest

from services.jobs.store import store_thread
from services.jobs.store.store_thread import StoreThread
from tokenwire.errors import ServiceError

HANG_SECONDS = 30


async def test_event_loop_runs_while_the_database_is_locked() -> None:
    thread, unlocked = StoreThread("files"), threading.Event()
    waiting = asyncio.ensure_future(thread.run(unlocked.wait, HANG_SECONDS))
    await asyncio.sleep(0)
    unlocked.set()  # never, if the call ran on the event loop
    assert await waiting
    thread.close()


async def test_calls_that_wait_too_long_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would meet the lock in its turn, so the last of many would wait for all."""
    monkeypatch.setattr(store_thread, "_MOST_SECONDS", 0.0)
    thread, unlocked, calls = StoreThread("files"), threading.Event(), list[str]()
    first = asyncio.ensure_future(thread.run(unlocked.wait, HANG_SECONDS))
    second = asyncio.ensure_future(thread.run(calls.append, "second"))
    await asyncio.sleep(0)
    unlocked.set()
    with pytest.raises(ServiceError) as refused:
        await second
    assert refused.value.code is grpc.StatusCode.UNAVAILABLE
    assert refused.value.reason == "FILES_UNAVAILABLE"
    assert calls == []
    with pytest.raises(ServiceError):
        await first
    thread.close()


async def test_more_calls_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_thread, "_MOST_WAITING", 1)
    thread, unlocked = StoreThread("files"), threading.Event()
    first = asyncio.ensure_future(thread.run(unlocked.wait, HANG_SECONDS))
    await asyncio.sleep(0)
    with pytest.raises(ServiceError):
        await thread.run(int)
    unlocked.set()
    assert await first
    thread.close()
