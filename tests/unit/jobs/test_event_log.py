"""Kept events: every reader gets them in order, without a gap, within the limit."""

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.jobs.store.event_log import EventLogs
from tokenwire.errors import ServiceError

ACTIONS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 400) | st.none()), max_size=60)
"""Additions of an event of a size to one of three logs; None = its end"""


def event(log: int, number: int, size: int = 0) -> bytes:
    return b"data: %d %d %b\n\n" % (log, number, b"x" * size)


@given(actions=ACTIONS, limit=st.integers(0, 4_000))
def test_kept_events_are_the_last_ones_and_within_the_limit(
    actions: list[tuple[int, int | None]], limit: int
) -> None:
    logs = EventLogs(limit)
    opened = [logs.open(str(index), "") for index in range(3)]
    written: list[list[bytes]] = [[], [], []]
    for index, size in actions:
        if size is None:
            opened[index].end()
        elif not opened[index].has_ended:
            written[index].append(event(index, len(written[index]), size))
            opened[index].add(written[index][-1])
        kept = [log for log in opened if log.is_kept]
        assert sum(log.size for log in kept) <= limit
        for each, events in zip(opened, written, strict=True):
            assert each.next == len(events)
    for log, events in zip(opened, written, strict=True):
        readable: list[int] = []
        for number in range(log.next + 1):
            with contextlib.suppress(ServiceError):  # kept no longer
                read = log.read(number, 500)
                assert read == events[number : number + len(read)]
                readable.append(number)
        assert readable == [*range(log.next + 1 - len(readable), log.next + 1)]
        if sum(len(each) + 64 for some in written for each in some) <= limit:
            assert len(readable) == log.next + 1


def test_ended_logs_give_way_first() -> None:
    logs = EventLogs(1_000)
    running, old = logs.open("running", ""), logs.open("old", "")
    running.add(event(0, 0, 300))
    old.add(event(1, 0, 300))
    old.end()
    running.add(event(0, 1, 300))
    assert logs.find("old", "") is None
    assert running.read(0, 10_000) == [event(0, 0, 300), event(0, 1, 300)]


def test_small_log_keeps_its_events_beside_large_ones() -> None:
    """A stream that is read at once would lose its events to others."""
    logs = EventLogs(2_000)
    large, small = logs.open("large", ""), logs.open("small", "")
    for number in range(10):
        large.add(event(0, number, 400))
        small.add(event(1, number))
    assert small.read(0, 10_000) == [event(1, number) for number in range(10)]


def test_only_its_owner_reads_a_log() -> None:
    logs = EventLogs(1_000)
    log = logs.open("a", "one")
    assert logs.find("a", "one") is log
    assert logs.find("a", "two") is None
    logs.delete("a")
    assert logs.find("a", "one") is None


async def test_reader_waits_for_the_next_event_or_the_end() -> None:
    log = EventLogs(1_000).open("a", "")
    waiting = [asyncio.ensure_future(log.grown(0)) for _ in range(2)]
    await asyncio.sleep(0)
    log.add(event(0, 0) + event(0, 1))
    await asyncio.gather(*waiting)
    assert log.read(1, 1_000) == [event(0, 1)]
    ending = asyncio.ensure_future(log.grown(2))
    await asyncio.sleep(0)
    assert not ending.done()
    log.end()
    await ending


def test_large_pieces_are_read_one_after_the_other() -> None:
    log = EventLogs(10_000).open("a", "")
    log.add(event(0, 0, 400) + event(0, 1, 400))
    assert log.read(0, 100) == [event(0, 0, 400)]
    log.drop_oldest()
    with pytest.raises(ServiceError):
        log.read(0, 100)
