"""Log lines are written beside the caller: none waits, few are lost, and a gap is marked."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from services.common.line_writer import LineWriter, write_to

HANG_SECONDS = 60


class Reader:
    """A log whose reader stands still until it is released."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.is_writing = threading.Event()
        self.goes_on = threading.Event()

    def write(self, lines: bytes) -> None:
        self.is_writing.set()
        assert self.goes_on.wait(HANG_SECONDS)
        self.lines += lines.splitlines()


def notice(lost: int) -> bytes:
    return b"%d lost\n" % lost


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    try:
        yield reader, writer
    finally:
        os.close(reader)
        os.close(writer)


def test_lines_beyond_the_queue_are_lost_and_their_number_stands_in_the_gap() -> None:
    reader = Reader()
    log = LineWriter(reader.write, notice, most_bytes=20)
    assert log.put(b"line 0\n")
    assert reader.is_writing.wait(HANG_SECONDS)
    kept = [number for number in range(1, 9) if log.put(b"line %d\n" % number)]
    assert kept == [1]  # with the one that is being written, 14 of 20 bytes
    reader.goes_on.set()
    log.flush(HANG_SECONDS)
    assert log.put(b"line 9\n")
    log.flush(HANG_SECONDS)
    assert reader.lines == [b"line 0", b"line 1", b"7 lost", b"line 9"]


def test_busy_log_that_is_read_loses_nothing() -> None:
    """The bound is on what waits, not on what was ever put."""
    lines: list[bytes] = []
    log = LineWriter(lambda part: lines.extend(part.splitlines()), notice, most_bytes=1 << 16)
    for first in range(0, 20_000, 100):
        for number in range(first, first + 100):
            assert log.put(b"line %d\n" % number)
        log.flush(HANG_SECONDS)
    assert lines == [b"line %d" % number for number in range(20_000)]


def test_calls_keep_their_place_among_the_lines() -> None:
    """A log file is opened again after the lines of the old one."""
    done: list[bytes] = []
    log = LineWriter(done.append, notice)
    log.put(b"before\n")
    log.call(lambda: done.append(b"opened again"))
    log.put(b"after\n")
    log.close()
    log.flush(HANG_SECONDS)
    assert done == [b"before\n", b"opened again", b"after\n"]


@pytest.mark.parametrize("blocks", [True, False])
def test_lines_are_whole_in_a_pipe_that_several_processes_write_to(blocks: bool) -> None:
    with pipe() as (reader, writer):
        os.set_blocking(writer, blocks)
        log = LineWriter(lambda lines: write_to(writer, lines), notice)
        lines = [b"x" * (number % 700) + b"\n" for number in range(2000)] + [b"y" * 100_000]
        for line in lines:
            log.put(line)
        read: list[bytes] = []
        whole = b"".join(lines)
        while sum(map(len, read)) < len(whole):
            read.append(os.read(reader, 4096))
        assert b"".join(read) == whole


def test_broken_log_ends_neither_the_thread_nor_the_caller() -> None:
    written: list[bytes] = []

    def write(lines: bytes) -> None:
        if b"bad" in lines:
            raise OSError
        written.append(lines)

    log = LineWriter(write, notice)
    for line in (b"bad\n", b"good\n"):
        log.put(line)
        log.flush(HANG_SECONDS)
    assert written == [b"good\n"]
