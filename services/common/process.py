"""The process of a service: its imports, its file limit, its stop signals and its end."""

import asyncio
import contextlib
import gc
import os
import resource
import select
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from services.common import logging as service_logging

__all__ = [
    "collector_paused",
    "end_on_termination",
    "end_process",
    "ends_with_peer",
    "open_standard_files",
    "raise_file_limit",
    "stop_signal",
]

_STDERR = 2


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Import large packages without garbage collection, and exempt their objects from it.

    The objects live as long as the process. Collections would take a sixth of torch's import.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_process(code: int) -> NoReturn:
    """End the process at once, once its log is written. It skips torch's slow teardown."""
    service_logging.flush()
    os._exit(code)


def end_on_termination() -> None:
    """Let SIGTERM raise SystemExit until `stop_signal`, so that contexts are left.

    By default it would end the process at once, and temporary folders would stay.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))


@contextlib.contextmanager
def ends_with_peer(link: socket.socket) -> Iterator[None]:
    """End this process at once, with exit code 0, if a socket's peer closes it meanwhile.

    This serves work that does not read the socket for seconds: a peer that is killed sends no
    other sign.
    """
    is_over = threading.Event()

    def watch() -> None:
        poll = select.poll()
        poll.register(link, 0)  # without flags, only a hang-up is reported
        poll.poll()
        if not is_over.is_set():
            end_process(0)

    threading.Thread(target=watch, name="peer", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def open_standard_files() -> None:
    """Open those of standard input, output and error that the caller closed on the null device.

    Sockets would take their numbers: libuv aborts a process that closes a socket of such a number.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stderr is None:
        sys.stderr = os.fdopen(_STDERR, "w", closefd=False)


def raise_file_limit() -> None:
    """Raise the soft limit on open files, and so on connections, to the hard one.

    At the limit, the kernel resets new connections before the service sees them.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # "unlimited" can exceed the system's limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def stop_signal() -> asyncio.Future[None]:
    """Return a future that is done at the first SIGTERM or SIGINT."""
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def on_signal() -> None:
        if not stop.done():
            stop.set_result(None)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    return stop
