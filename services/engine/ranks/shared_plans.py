"""Plans in memory that the ranks of one machine share. Free of torch."""

import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from services.engine.ranks.plan_channel import PlanChannel, RankLostError
from services.engine.ranks.shared_ring import SharedRing

__all__ = ["SharedPlans"]

_CAPACITY = 1 << 20
"""Bytes of the ring, which hold plans of hundreds of decode steps, or part of a long plan"""
_SPIN_NS = 50_000
"""Nanoseconds for which a reader polls for a plan before it sleeps: about the time of a wake-up"""
_ROOM_SECONDS = 0.0002
"""Seconds between two checks of the writer for room in a full ring"""
_JOIN_SECONDS = 10.0
"""Seconds that ranks wait for each other while they open a channel"""
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a socket's peer"""
_LENGTH = struct.Struct("=q")


class SharedPlans(PlanChannel):
    """Channel of plans in memory that the ranks of one machine share.

    Every other rank also has a socket to rank 0. After each plan, rank 0 sends a byte there, which
    wakes a rank that sleeps. The socket closes when the process at its other end has ended.
    """

    def __init__(self, ring: SharedRing, links: Sequence[socket.socket], reader: int = 0) -> None:
        """links: sockets to all other ranks, or to rank 0. reader: this rank in the ring."""
        self._ring = ring
        self._links = links
        self._reader = reader

    @staticmethod
    def open(number: int, count: int, gather: Callable[[str], Sequence[str]]) -> "SharedPlans":
        """Open the channel on rank `number` of `count`, all on this machine.

        gather: collects a string of every rank, in order of rank. Raises OSError.
        """
        if number == 0:
            return _lead(count, gather)
        return _join(count, gather(""))

    def send(self, plan: bytes) -> None:
        rest = memoryview(_LENGTH.pack(len(plan)) + plan)
        while True:
            rest = rest[self._ring.write(rest) :]
            for link in self._links:
                _ring_bell(link)
            if not rest:
                return
            time.sleep(_ROOM_SECONDS)

    def receive(self) -> bytearray:
        [length] = _LENGTH.unpack(self._read(_LENGTH.size))
        return self._read(length)

    def _read(self, count: int) -> bytearray:
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            self._wait()
            rest = rest[self._ring.read(self._reader, rest) :]
        return data

    def _wait(self) -> None:
        """Return when the ring has bytes."""
        end = time.perf_counter_ns() + _SPIN_NS
        while self._ring.is_empty(self._reader):
            if time.perf_counter_ns() < end:
                os.sched_yield()
            else:
                self._sleep()

    def _sleep(self) -> None:
        """Return when rank 0 has sent a byte, possibly for a plan that was already read."""
        try:
            bells = self._links[0].recv(4096)
        except ConnectionError:
            bells = b""
        # rank 0 may have ended after its last plan
        if not bells and self._ring.is_empty(self._reader):
            raise RankLostError("rank 0 has ended")


def _ring_bell(link: socket.socket) -> None:
    try:
        link.send(b"\0", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
    except BlockingIOError:
        pass  # the reader has unread bytes, which wake it
    except ConnectionError:
        raise RankLostError("a rank has ended") from None


def _lead(count: int, gather: Callable[[str], Sequence[str]]) -> SharedPlans:
    """Make the ring and pass it to the other ranks."""
    name = f"tokenwire-{secrets.token_hex(16)}"
    with ExitStack() as stack, socket.socket(socket.AF_UNIX) as listener:
        try:
            descriptor = SharedRing.create(count - 1, _CAPACITY)
            stack.callback(os.close, descriptor)
            listener.settimeout(_JOIN_SECONDS)
            # a leading zero byte makes a name without a file, which ends with its socket
            listener.bind(f"\0{name}")
            listener.listen(count)
        except OSError:
            gather("")
            raise
        gather(name)
        links = []
        for reader in range(count - 1):
            link = _accept(listener)
            links.append(link)
            socket.send_fds(link, [bytes([reader])], [descriptor])
        return SharedPlans(SharedRing(descriptor, count - 1), links)


def _accept(listener: socket.socket) -> socket.socket:
    """Return a connection from a process of this user."""
    while True:
        link, _ = listener.accept()
        peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(peer)
        if user == os.getuid():
            return link
        link.close()


def _join(count: int, names: Sequence[str]) -> SharedPlans:
    """Get the ring from rank 0."""
    if not names[0]:
        raise OSError("rank 0 could not make shared memory")
    link = socket.socket(socket.AF_UNIX)
    link.settimeout(_JOIN_SECONDS)
    link.connect(f"\0{names[0]}")
    reader, descriptors, _, _ = socket.recv_fds(link, 1, 1)
    if not descriptors:
        raise OSError("rank 0 has ended")
    link.settimeout(None)
    try:
        return SharedPlans(SharedRing(descriptors[0], count - 1), [link], reader[0])
    finally:
        os.close(descriptors[0])
