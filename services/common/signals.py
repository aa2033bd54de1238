"""How a service is told to stop, and what ended a process."""

import asyncio
import signal

__all__ = ["ending", "stop_signal"]


def stop_signal() -> asyncio.Future[None]:
    """Done at the first SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if not stop.done():
            stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop


def ending(code: int | None) -> str:
    """What an exit status tells, -9 being SIGKILL: "signal SIGKILL", or "exit code 1"."""
    if code is None or code >= 0:
        return f"exit code {code}"
    return f"signal {signal.Signals(-code).name}"
