"""Writer of log lines in a thread of its own: the caller never waits for the reader of a log."""

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

__all__ = ["LineWriter", "write_to"]

_ATOMIC_BYTES = select.PIPE_BUF
"""Bytes that one write to a pipe keeps together, even if other processes write to it"""
_MOST_BYTES = 1 << 20
"""Largest total of the lines that wait to be written, in bytes"""


class LineWriter:
    """Bounded queue of whole lines. Lines that find it full are lost and counted.

    Writes may block for long: nobody reads the pipe, the terminal is paused, or the disk hangs.
    """

    def __init__(
        self,
        write: Callable[[bytes], None],
        notice: Callable[[int], bytes],
        *,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """write: called in the thread with one or more lines, which are lost if it raises OSError.

        notice: returns the line that stands in place of lost lines and gives their number.
        """
        self._write = write
        self._notice = notice
        self._most_bytes = most_bytes
        self._waiting: deque[bytes | Callable[[], None]] = deque()
        self._num_bytes = 0
        """Bytes of the lines that wait or are being written"""
        self._lost = 0
        self._is_idle = True
        self._is_closing = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def put(self, lines: bytes) -> bool:
        """Queue whole lines; return False if the queue is full and they are lost."""
        with self._changed:
            if self._num_bytes and self._num_bytes + len(lines) > self._most_bytes:
                self._lost += lines.count(b"\n")
                return False
            self._note_gap()
            self._enqueue(lines)
            return True

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the thread once all lines before it are written."""
        with self._changed:
            self._enqueue(function)

    def flush(self, seconds: float) -> None:
        """Wait until all lines are written, for at most `seconds`."""
        end = time.monotonic() + seconds
        with self._changed:
            self._note_gap()
            while not self._is_idle and (rest := end - time.monotonic()) > 0:
                self._changed.wait(rest)

    def close(self) -> None:
        """End the thread once all lines are written. Call neither `put` nor `call` afterwards."""
        with self._changed:
            self._note_gap()
            self._is_closing = True
            self._changed.notify_all()

    def _note_gap(self) -> None:
        if self._lost:
            lost, self._lost = self._lost, 0
            self._enqueue(self._notice(lost))

    def _enqueue(self, item: bytes | Callable[[], None]) -> None:
        self._waiting.append(item)
        self._num_bytes += len(item) if isinstance(item, bytes) else 0
        if self._is_idle:
            self._is_idle = False
            self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="log", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        done = 0
        while (item := self._next(done)) is not None:
            with suppress(OSError):
                if isinstance(item, bytes):
                    for lines in _pieces(item):
                        self._write(lines)
                else:
                    item()
            done = len(item) if isinstance(item, bytes) else 0

    def _next(self, done: int) -> bytes | Callable[[], None] | None:
        """Return the next function, or all lines that wait before it; None after `close`.

        done: number of bytes that were written since the last call.
        """
        with self._changed:
            self._num_bytes -= done
            while not self._waiting:
                self._is_idle = True
                self._changed.notify_all()
                if self._is_closing:
                    return None
                self._changed.wait()
            first = self._waiting.popleft()
            if not isinstance(first, bytes):
                return first
            lines = [first]
            while self._waiting and isinstance(lines_after := self._waiting[0], bytes):
                lines.append(lines_after)
                self._waiting.popleft()
            return b"".join(lines)


def write_to(descriptor: int, content: bytes) -> None:
    """Write all bytes, also to a descriptor that does not block. Raises OSError."""
    rest = memoryview(content)
    while rest:
        try:
            rest = rest[os.write(descriptor, rest) :]
        except BlockingIOError:
            select.select([], [descriptor], [])


def _pieces(lines: bytes) -> Iterator[bytes]:
    """Yield groups of whole lines, each as large as one write keeps together."""
    start = 0
    while len(lines) - start > _ATOMIC_BYTES:
        end = lines.rfind(b"\n", start, start + _ATOMIC_BYTES) + 1
        if end <= start:
            end = lines.find(b"\n", start) + 1 or len(lines)
        yield lines[start:end]
        start = end
    if start < len(lines):
        yield lines[start:]
