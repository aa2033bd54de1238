"""Block pool: no sequence may read the keys and values of another."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.block_hash import hash_block
from services.common.cached_prefix import CachedGroup, longest_prefix
from services.engine.scheduling.block_pool import BlockPool, OutOfBlocksError


def hash_of(*ids: int) -> bytes:
    return hash_block(b"salt", np.array(ids, dtype=np.int32).tobytes())


def find(pool: BlockPool, hashes: Sequence[bytes]) -> list[int]:
    """Return the blocks of the longest prefix that a pool has."""
    count = longest_prefix(hashes, [CachedGroup(pool.cached)], 1)
    return [pool.cached[each] for each in hashes[:count]]


def test_prefix_is_found_after_its_sequence_ended() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.cache(blocks[0], hash_of(1))
    pool.cache(blocks[1], hash_of(2))
    pool.release(blocks)
    assert find(pool, [hash_of(1), hash_of(2), hash_of(3)]) == blocks


def test_prefix_is_found_only_from_its_start() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.cache(blocks[1], hash_of(2))
    assert find(pool, [hash_of(1), hash_of(2)]) == []


def test_held_block_is_not_allocated() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.cache(block, hash_of(1))
    pool.hold([block])
    pool.release([block])
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_end_of_a_prefix_is_evicted_before_its_start() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.cache(block, hash_of(i))
    pool.release(blocks)
    pool.allocate(1)
    assert find(pool, [hash_of(0), hash_of(1), hash_of(2)]) == blocks[:2]


def test_uncached_blocks_are_allocated_first() -> None:
    pool = BlockPool(2)
    cached, uncached = pool.allocate(2)
    pool.cache(cached, hash_of(1))
    pool.release([cached])
    pool.release([uncached])
    assert pool.allocate(1) == [uncached]


def test_block_hashes_depend_on_parent_and_tenant() -> None:
    ids = np.array([1, 2], dtype=np.int32).tobytes()
    assert hash_block(b"a", ids) != hash_block(b"b", ids)


def test_changes_are_noted_after_what_was_cached_before() -> None:
    pool = BlockPool(2)
    old, new = pool.allocate(2)
    pool.cache(old, hash_of(1))
    assert pool.take_change() is None
    pool.follow()
    pool.cache(new, hash_of(2))
    change = pool.take_change()
    assert change is not None
    assert set(change.stored) == {hash_of(1), hash_of(2)}
    pool.release([old])
    pool.allocate(1)
    change = pool.take_change()
    assert change is not None
    assert (change.stored, change.removed) == ([], [hash_of(1)])
    assert pool.take_change() is None


def test_flush_leaves_held_blocks_cached() -> None:
    pool = BlockPool(3)
    held, cached = pool.allocate(2)
    pool.cache(held, hash_of(1))
    pool.cache(cached, hash_of(2))
    pool.release([cached])
    assert pool.flush() == 1
    assert find(pool, [hash_of(1)]) == [held]
    assert find(pool, [hash_of(2)]) == []


@given(st.lists(st.tuples(st.sampled_from("ahrc"), st.integers(0, 7)), max_size=80))
def test_no_block_is_lost_or_allocated_twice(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    tables: list[list[int]] = []
    for action, number in actions:
        if action == "a":
            if number <= pool.num_free:
                tables.append(pool.allocate(number))
            else:
                with pytest.raises(OutOfBlocksError):
                    pool.allocate(number)
        elif action == "r" and tables:
            pool.release(tables.pop(number % len(tables)))
        elif action == "c" and tables:
            for i, block in enumerate(tables[number % len(tables)]):
                pool.cache(block, hash_of(number, i))
        elif action == "h":
            found = find(pool, [hash_of(number, i) for i in range(3)])
            pool.hold(found)
            tables.append(found)
        pool.check(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 8
