"""Plans in shared memory: order, long plans, killed processes."""

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Barrier

import pytest

from services.engine.ranks.plan_channel import RankLostError
from services.engine.ranks.shared_plans import SharedPlans

LONG = 3 << 20
"""Bytes: three times the ring"""


def _open_all(count: int) -> list[SharedPlans]:
    """Open the channel of `count` ranks that are threads of this process."""
    names, barrier = [""] * count, Barrier(count)

    def open_one(number: int) -> SharedPlans:
        def gather(mine: str) -> Sequence[str]:
            names[number] = mine
            barrier.wait()
            return names

        return SharedPlans.open(number, count, gather)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(open_one, range(count)))


def _receive(reader: SharedPlans, count: int) -> list[bytearray]:
    return [reader.receive() for _ in range(count)]


def test_all_ranks_get_all_plans_in_order() -> None:
    plans = [bytes([i % 256]) * (i * 37 % 5000) for i in range(2000)]
    writer, *readers = _open_all(3)
    with ThreadPoolExecutor() as pool:
        received = [pool.submit(_receive, reader, len(plans)) for reader in readers]
        for plan in plans:
            writer.send(plan)
        assert all(each.result() == plans for each in received)


def test_plan_may_be_longer_than_the_ring() -> None:
    plan = os.urandom(LONG)
    writer, *readers = _open_all(3)
    with ThreadPoolExecutor() as pool:
        received = [pool.submit(reader.receive) for reader in readers]
        writer.send(plan)
        writer.send(b"")
        assert all(each.result() == plan for each in received)
        assert all(reader.receive() == b"" for reader in readers)


def _run(number: int, ours: Connection) -> None:
    """Open the channel as one rank of two; send two plans as rank 0; then wait to be killed."""

    def gather(mine: str) -> Sequence[str]:
        ours.send(mine)
        names: list[str] = ours.recv()
        return names

    plans = SharedPlans.open(number, 2, gather)
    if number == 0:
        plans.send(b"first")
        plans.send(b"second")
    ours.send("is open")
    ours.recv()


@contextmanager
def _other_rank(number: int) -> Iterator[tuple[SharedPlans, BaseProcess, str]]:
    """Start a process as rank `number` of two. Yields our channel, the process and the name."""
    context = multiprocessing.get_context("spawn")
    link, theirs = context.Pipe()
    process = context.Process(target=_run, args=(number, theirs))
    process.start()
    theirs.close()
    names = ["", ""]

    def gather(mine: str) -> Sequence[str]:
        names[number], names[1 - number] = link.recv(), mine
        link.send(names)
        return names

    try:
        plans = SharedPlans.open(1 - number, 2, gather)
        assert link.recv() == "is open"
        yield plans, process, names[0]
    finally:
        process.kill()
        process.join()


def _kill(process: BaseProcess) -> None:
    process.kill()
    process.join()


def test_reader_gets_the_last_plans_of_a_killed_writer_then_notices() -> None:
    with _other_rank(0) as (plans, process, _):
        _kill(process)
        assert plans.receive() == b"first"
        assert plans.receive() == b"second"
        with pytest.raises(RankLostError, match="rank 0 has ended"):
            plans.receive()


def test_reader_that_waits_notices_that_the_writer_is_killed() -> None:
    with _other_rank(0) as (plans, process, _), ThreadPoolExecutor() as pool:
        assert [plans.receive(), plans.receive()] == [b"first", b"second"]
        waiting = pool.submit(plans.receive)
        _kill(process)
        with pytest.raises(RankLostError):
            waiting.result()


def test_writer_notices_a_killed_reader() -> None:
    with _other_rank(1) as (plans, process, _):
        plans.send(b"is never read")
        _kill(process)
        with pytest.raises(RankLostError):
            plans.send(bytes(LONG))


def test_writer_that_waits_for_room_notices_that_the_reader_is_killed() -> None:
    with _other_rank(1) as (plans, process, _), ThreadPoolExecutor() as pool:
        waiting = pool.submit(plans.send, bytes(LONG))
        _kill(process)
        with pytest.raises(RankLostError):
            waiting.result()


def test_killed_ranks_leave_no_shared_memory() -> None:
    with _other_rank(0) as (plans, process, name):
        assert name
        assert not [file for file in os.listdir("/dev/shm") if "tokenwire" in file]
        _kill(process)
        del plans
    assert name not in Path("/proc/net/unix").read_text()


def test_failure_to_make_memory_is_raised_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError("refused")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(OSError, match="refused"):
        _open_all(2)
