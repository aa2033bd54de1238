"""Background tasks of the process: each is started again when it fails."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from prometheus_client import Counter

from services.common.faults import begin_fault, end_fault

__all__ = ["keep_running"]

_LOG = logging.getLogger("background")
_FAILURES = Counter(
    "tokenwire_background_failures", "Unexpected ends of background tasks.", ["task"]
)
_FIRST_PAUSE, _MOST_PAUSE = 0.1, 30.0
"""Seconds after which a failed task starts again; the pause doubles with each failure"""
_STEADY_SECONDS = 5.0
"""Time after which a task that was started again counts as repaired"""


def keep_running(
    name: str,
    work: Callable[[], Coroutine[Any, Any, None]],
    steady_seconds: float = _STEADY_SECONDS,
) -> asyncio.Task[None]:
    """Run `work()` in a task until it returns; start it again, with pauses, while it raises.

    name: name of the task in the log, in a metric, and in the list of faulty parts. Names are label
    values of the metric, so they must not contain an address. Cancel the task to end it.
    """
    return asyncio.ensure_future(_BackgroundTask(name, work, steady_seconds).run())


class _BackgroundTask:
    """A task that is started again whenever it fails."""

    def __init__(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], steady_seconds: float
    ) -> None:
        self._name = name
        self._work = work
        self._steady_seconds = steady_seconds
        self._pause = _FIRST_PAUSE
        self._is_faulty = False

    async def run(self) -> None:
        """Run the task until it returns or is cancelled."""
        try:
            while not await self._run_once():
                await asyncio.sleep(self._pause)
                self._pause = min(2 * self._pause, _MOST_PAUSE)
        finally:
            self._repair()

    async def _run_once(self) -> bool:
        """Run the task once. Return False if it fails."""
        loop = asyncio.get_running_loop()
        repair = loop.call_later(self._steady_seconds, self._repair) if self._is_faulty else None
        try:
            await self._work()
        except asyncio.CancelledError as error:
            if _is_cancelled():
                raise
            self._note_failure(error)  # another task that this one awaits was cancelled
        except Exception as error:
            self._note_failure(error)
        else:
            return True
        finally:
            if repair is not None:
                repair.cancel()
        return False

    def _note_failure(self, error: BaseException) -> None:
        _FAILURES.labels(self._name).inc()
        trace = None if self._is_faulty else error  # one traceback is enough
        _LOG.error(
            "the task %s failed and starts again after %g s: %r",
            *(self._name, self._pause, error),
            exc_info=trace,
        )
        if not self._is_faulty:
            self._is_faulty = True
            begin_fault(self._name)

    def _repair(self) -> None:
        self._pause = _FIRST_PAUSE
        if self._is_faulty:
            self._is_faulty = False
            end_fault(self._name)


def _is_cancelled() -> bool:
    """Return whether the current task itself was cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
