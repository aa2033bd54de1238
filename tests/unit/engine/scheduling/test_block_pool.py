"""Without the pool's promises, sequences would read each other's keys and values."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.scheduling.block_pool import BlockPool, OutOfBlocksError, hash_block


def name(*ids: int) -> bytes:
    return hash_block(b"salt", np.array(ids, dtype=np.int32))


def test_a_prefix_is_found_again_after_its_sequence_ended() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.name(blocks[0], name(1))
    pool.name(blocks[1], name(2))
    pool.release(blocks)
    assert pool.find([name(1), name(2), name(3)]) == blocks


def test_a_prefix_is_found_only_from_its_start() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.name(blocks[1], name(2))
    assert pool.find([name(1), name(2)]) == []


def test_a_held_block_is_never_handed_out() -> None:
    pool = BlockPool(2)
    [block] = pool.allocate(1)
    pool.name(block, name(1))
    pool.hold([block])
    pool.release([block])
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)


def test_the_end_of_a_prefix_is_given_up_before_its_start() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for i, block in enumerate(blocks):
        pool.name(block, name(i))
    pool.release(blocks)
    pool.allocate(1)
    assert pool.find([name(0), name(1), name(2)]) == blocks[:2]


def test_blocks_that_cache_nothing_are_used_first() -> None:
    pool = BlockPool(2)
    kept, plain = pool.allocate(2)
    pool.name(kept, name(1))
    pool.release([kept])
    pool.release([plain])
    assert pool.allocate(1) == [plain]


def test_names_depend_on_what_comes_before_and_on_the_tenant() -> None:
    ids = np.array([1, 2], dtype=np.int32)
    assert hash_block(b"a", ids) != hash_block(b"b", ids)


def test_flush_forgets_only_what_nobody_holds() -> None:
    pool = BlockPool(3)
    held, cached = pool.allocate(2)
    pool.name(held, name(1))
    pool.name(cached, name(2))
    pool.release([cached])
    assert pool.flush() == 1
    assert pool.find([name(1)]) == [held]
    assert pool.find([name(2)]) == []


@given(st.lists(st.tuples(st.sampled_from("ahrn"), st.integers(0, 7)), max_size=80))
def test_no_block_is_lost_or_held_twice(actions: list[tuple[str, int]]) -> None:
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
        elif action == "n" and tables:
            for i, block in enumerate(tables[number % len(tables)]):
                pool.name(block, name(number, i))
        elif action == "h":
            found = pool.find([name(number, i) for i in range(3)])
            pool.hold(found)
            tables.append(found)
        pool.check(tables)
    for table in tables:
        pool.release(table)
    assert pool.num_free == 8
