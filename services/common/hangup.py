"""SIGHUP, the signal to a service that its catalog has changed."""

import asyncio
import signal
from collections.abc import Callable

__all__ = ["block_hangup", "on_hangup"]


def block_hangup() -> None:
    """Hold SIGHUP back, for this process and those that it starts, until `on_hangup`.

    A signal that comes before a service can handle it would end the service.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def on_hangup(callback: Callable[[], None]) -> None:
    """Call `callback` at each SIGHUP, and at once for one that was held back.

    Call it in the main thread, on the event loop.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, callback)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
