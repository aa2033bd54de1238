"""Background tasks: a task that fails starts again, and is named while it fails."""

import asyncio
import contextlib
import logging

import pytest

from services.common import background
from services.common.background import keep_running
from services.common.faults import faulty_parts

HANG_SECONDS = 30


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "_FIRST_PAUSE", 0.001)
    monkeypatch.setattr(background, "_MOST_PAUSE", 0.002)


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_task_that_fails_starts_again_and_is_named_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs, third = 0, asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs < 3:
            raise OSError("no descriptor is free")
        third.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR, "background"):
        task = keep_running("some_task", work)
        async with asyncio.timeout(HANG_SECONDS):
            await third.wait()
    assert faulty_parts() == ["some_task"]  # until it has run for a while
    first, second = (record for record in caplog.records if record.name == "background")
    assert "some_task" in first.getMessage()
    assert "no descriptor is free" in second.getMessage()
    await cancelled(task)
    assert faulty_parts() == []


async def test_task_that_runs_again_is_repaired() -> None:
    runs = 0

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            raise ValueError
        await asyncio.Event().wait()

    task = keep_running("some_task", work, steady_seconds=0)
    async with asyncio.timeout(HANG_SECONDS):
        while runs < 2 or faulty_parts():  # noqa: ASYNC110 - a fault has no event
            await asyncio.sleep(0)
    await cancelled(task)


async def test_cancellation_that_comes_from_another_task_is_a_failure() -> None:
    """Such a task would end without a word: asyncio reports no cancelled task."""
    runs, again = 0, asyncio.Event()

    async def work() -> None:
        nonlocal runs
        runs += 1
        if runs == 1:
            other = asyncio.get_running_loop().create_future()
            other.cancel()
            await other
        again.set()
        await asyncio.Event().wait()

    task = keep_running("some_task", work)
    async with asyncio.timeout(HANG_SECONDS):
        await again.wait()
    await cancelled(task)


async def test_task_that_returns_has_ended() -> None:
    async def work() -> None:
        return

    async with asyncio.timeout(HANG_SECONDS):
        await keep_running("some_task", work)
    assert faulty_parts() == []
