"""Ring buffer in memory for one writer and several readers on a machine. Free of torch."""

import mmap
import os
import threading

__all__ = ["SharedRing"]

_LINE = 64
"""Bytes of a cache line: two processes that write to one line slow each other down"""
_fence_lock = threading.Lock()


class SharedRing:
    """One writer's stream of bytes, which every reader reads completely and in order.

    The memory begins with the number of bytes written and, for each reader, the number of bytes
    read, each in its own cache line. The ring follows. No call waits: it returns the number of
    bytes that it could move.
    """

    def __init__(self, descriptor: int, readers: int) -> None:
        """descriptor: file of `create`. It may be closed afterwards."""
        size = os.fstat(descriptor).st_size
        first = _LINE * (1 + readers)
        self._memory = memoryview(mmap.mmap(descriptor, size))
        self._counters = self._memory[:first].cast("Q")
        self._ring = self._memory[first:]
        self._places = range(_LINE // 8, first // 8, _LINE // 8)
        """Index of each reader's counter; the counter of the writer has the index 0"""

    @staticmethod
    def create(readers: int, capacity: int) -> int:
        """Return the descriptor of a new file in memory, for rings of `capacity` bytes.

        It has no name in any file system, so nothing is left of it when its processes have ended.
        Raises OSError.
        """
        descriptor = os.memfd_create("tokenwire-plans", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, _LINE * (1 + readers) + capacity)
        return descriptor

    def write(self, data: memoryview) -> int:
        """Write as many of the bytes as there is room for, and return their number."""
        written = self._counters[0]
        room = len(self._ring) - written + min(self._counters[place] for place in self._places)
        count = min(room, len(data))
        _fence()  # before the readers' bytes are overwritten
        start = written % len(self._ring)
        until_end = min(count, len(self._ring) - start)
        self._ring[start : start + until_end] = data[:until_end]
        self._ring[: count - until_end] = data[until_end:count]
        _fence()  # a reader that sees the counter must see the bytes
        self._counters[0] = written + count
        return count

    def read(self, reader: int, into: memoryview) -> int:
        """Move as many bytes to `into` as there are and fit, and return their number."""
        place = self._places[reader]
        done = self._counters[place]
        count = min(self._counters[0] - done, len(into))
        _fence()  # no byte may be read before the counter that promises it
        start = done % len(self._ring)
        until_end = min(count, len(self._ring) - start)
        into[:until_end] = self._ring[start : start + until_end]
        into[until_end:count] = self._ring[: count - until_end]
        _fence()  # the bytes must be read before the writer sees the room
        self._counters[place] = done + count
        return count

    def is_empty(self, reader: int) -> bool:
        """Return whether the reader has read everything."""
        return self._counters[0] == self._counters[self._places[reader]]


def _fence() -> None:
    """Stop the processor from moving reads and writes across this call; a lock is a barrier."""
    with _fence_lock:
        pass
