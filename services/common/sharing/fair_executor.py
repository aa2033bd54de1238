"""Threads for work that would block the event loop, in an order that is fair over tenants."""

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from services.common.sharing.fair_queue import FairQueue
from services.common.sharing.tenant import current_tenant

__all__ = ["FairExecutor", "use_fair_threads"]

_SWITCH_SECONDS = 5e-4
"""Seconds after which a thread gives up the interpreter; Python's 5 ms per busy thread would delay
every turn of the event loop"""
_LEAST_SECONDS = 1e-4
"""Seconds that work is charged when it begins; the rest of its time is added when it ends"""
P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Work:
    """A call, and the future of its result."""

    tenant: str
    call: Callable[[], Any]
    future: "Future[Any]"


def use_fair_threads() -> None:
    """Give the running event loop threads that serve tenants fairly, and that delay it little."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    asyncio.get_running_loop().set_default_executor(FairExecutor())


class FairExecutor(ThreadPoolExecutor):
    """Executor that next runs the work of the tenant that has used the least of its time."""

    def __init__(self, threads: int | None = None, name: str = "work") -> None:
        """threads: number; None = one per core, and two more for work that waits for the disk."""
        super().__init__(threads or (os.cpu_count() or 1) + 2, name)
        self._lock = threading.Lock()
        self._queue: FairQueue[_Work] = FairQueue()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queue a call for the tenant whose request the current task answers."""
        future: Future[T] = Future()
        work = _Work(current_tenant.get(), lambda: fn(*args, **kwargs), future)
        with self._lock:
            self._queue.put(work.tenant, work, _LEAST_SECONDS)
        super().submit(self._run_next)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            with self._lock:
                while self._queue:
                    self._queue.take().future.cancel()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _run_next(self) -> None:
        with self._lock:
            if not self._queue:  # `shutdown` has cancelled it
                return
            work = self._queue.take()
        if not work.future.set_running_or_notify_cancel():
            return
        started = time.perf_counter()
        try:
            result = work.call()
        except BaseException as error:
            work.future.set_exception(error)
        else:
            work.future.set_result(result)
        with self._lock:
            self._queue.charge(work.tenant, time.perf_counter() - started)
