"""Shared ring: readers get the writer's bytes, whatever the pieces."""

import os

from hypothesis import given
from hypothesis import strategies as st

from services.engine.ranks.shared_ring import SharedRing

READERS = 2


@given(
    capacity=st.integers(1, 20),
    turns=st.lists(st.tuples(st.integers(0, READERS), st.integers(0, 25)), max_size=60),
)
def test_every_reader_gets_every_byte_in_order(capacity: int, turns: list[tuple[int, int]]) -> None:
    descriptor = SharedRing.create(READERS, capacity)
    writer, *readers = (SharedRing(descriptor, READERS) for _ in range(1 + READERS))
    os.close(descriptor)
    sent = bytearray()
    received = [bytearray() for _ in readers]
    for who, size in turns:
        if who == READERS:
            data = bytes((len(sent) + i) % 256 for i in range(size))
            count = writer.write(memoryview(data))
            room = capacity - len(sent) + min(map(len, received))
            assert count == min(size, room)
            sent += data[:count]
        else:
            into = bytearray(size)
            count = readers[who].read(who, memoryview(into))
            received[who] += into[:count]
            assert readers[who].is_empty(who) == (len(received[who]) == len(sent))
    for reader, so_far in enumerate(received):
        rest = bytearray(capacity)
        so_far += rest[: readers[reader].read(reader, memoryview(rest))]
        assert so_far == sent
