"""Work in threads: one tenant's does not keep another's waiting."""

import asyncio
import threading

import pytest

from services.common.sharing.fair_executor import FairExecutor
from services.common.sharing.tenant import current_tenant


async def test_another_tenant_waits_for_what_runs_only() -> None:
    loop = asyncio.get_running_loop()
    executor = FairExecutor(1)
    began, may_end, order = threading.Event(), threading.Event(), list[str]()

    def first() -> None:
        began.set()
        may_end.wait(60)

    def submit(tenant: str) -> "asyncio.Future[None]":
        previous = current_tenant.set(tenant)
        try:
            return loop.run_in_executor(executor, order.append, tenant)
        finally:
            current_tenant.reset(previous)

    running = loop.run_in_executor(executor, first)
    began.wait(60)
    work = [submit("a"), submit("a"), submit("b")]
    may_end.set()
    await asyncio.gather(running, *work)
    assert order == ["a", "b", "a"]
    executor.shutdown()


async def test_results_and_failures_reach_the_caller() -> None:
    loop = asyncio.get_running_loop()
    executor = FairExecutor(2)
    assert await loop.run_in_executor(executor, int, "7") == 7
    with pytest.raises(ValueError, match="invalid literal"):
        await loop.run_in_executor(executor, int, "x")
    executor.shutdown()


async def test_work_that_waits_at_a_shutdown_is_cancelled() -> None:
    loop = asyncio.get_running_loop()
    executor = FairExecutor(1)
    began, may_end = threading.Event(), threading.Event()

    def first() -> None:
        began.set()
        may_end.wait(60)

    running = loop.run_in_executor(executor, first)
    waiting = loop.run_in_executor(executor, began.is_set)
    began.wait(60)
    executor.shutdown(wait=False, cancel_futures=True)
    may_end.set()
    await running
    with pytest.raises(asyncio.CancelledError):
        await waiting
