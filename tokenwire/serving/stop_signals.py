"""StopSignals, the signals by which `tokenwire serve` is stopped."""

import asyncio
import signal
from collections.abc import Callable

__all__ = ["StopSignals"]


class StopSignals:
    """Signals to the supervisor: the first SIGINT or SIGTERM stops, the second kills.

    SIGHUP, which a closing terminal sends, also stops, unless `on_hangup` gives it a meaning.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.stop: asyncio.Future[None] = self._loop.create_future()
        self.kill: asyncio.Future[None] = self._loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            self._loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # ignored under nohup
            self._loop.add_signal_handler(signal.SIGHUP, self._on_signal)

    def on_hangup(self, callback: Callable[[], None]) -> None:
        """Let SIGHUP call `callback` instead of stopping."""
        self._loop.add_signal_handler(signal.SIGHUP, callback)

    def _on_signal(self) -> None:
        for future in (self.stop, self.kill):
            if not future.done():
                future.set_result(None)
                return
