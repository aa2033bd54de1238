"""Decodes are grouped by the blocks with which their contexts begin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.batch import shared_prefixes
from services.engine.batch.shared_prefixes import Integers, find_prefixes, most_prefixes

SIZE = 64


def contexts(*kinds: tuple[int, int], tail: int = 2) -> tuple[Integers, Integers]:
    """Return the tables and lengths of decodes. kinds: (decodes, blocks of their prefix)."""
    rows = sum(count for count, _ in kinds)
    width = max(blocks for _, blocks in kinds) + tail
    tables = np.arange(rows * width, dtype=np.int32).reshape(rows, width)
    lengths = np.empty(rows, dtype=np.int32)
    first = 0
    for count, blocks in kinds:
        tables[first : first + count, :blocks] = tables[first, :blocks]
        lengths[first : first + count] = (blocks + tail) * SIZE
        first += count
    return tables, lengths


def found(tables: Integers, lengths: Integers) -> list[tuple[list[int], int]]:
    prefixes = find_prefixes(tables, lengths, SIZE)
    return sorted((prefix.rows.tolist(), prefix.blocks) for prefix in prefixes)


def test_one_stream_without_the_prefix_leaves_it_to_the_others() -> None:
    """Otherwise a step would read the instructions of 255 agents 255 times."""
    assert found(*contexts((100, 125), (1, 0), (155, 125))) == [
        (list(range(100)), 125),
        (list(range(101, 256)), 125),
    ]


def test_each_kind_of_agents_has_its_prefix() -> None:
    tables, lengths = contexts((40, 20), (20, 9), (5, 30), (16, 8), (30, 7))
    order = np.random.default_rng(2).permutation(len(tables))
    places = np.argsort(order)
    kinds = ((0, 40, 20), (40, 60, 9), (65, 81, 8))
    expected = [(sorted(places[begin:end].tolist()), blocks) for begin, end, blocks in kinds]
    assert found(tables[order], lengths[order]) == sorted(expected)


def test_longer_prefix_of_some_is_preferred_where_it_saves_more() -> None:
    """Conversations about one document begin with the instructions of all others."""
    tables, lengths = contexts((60, 30), tail=100)
    tables[20:, 30:80] = tables[20, 30:80]
    assert found(tables, lengths) == [(list(range(20)), 30), (list(range(20, 60)), 80)]
    tables, lengths = contexts((60, 30), tail=100)
    tables[40:, 30] = tables[40, 30]
    assert found(tables, lengths) == [(list(range(60)), 30)], "one block more, for a third"


def test_last_token_of_a_context_is_in_no_prefix() -> None:
    tables, lengths = contexts((32, 9), tail=0)
    assert found(tables, lengths) == [(list(range(32)), 8)]
    assert found(tables, lengths - 1 - SIZE) == []


def test_few_sharers_or_tokens_are_not_worth_a_pass() -> None:
    assert found(*contexts((31, 100))) == []
    assert found(*contexts((200, 7))) == []
    assert found(*contexts((16, 9), (16, 0))) == []
    assert found(*contexts((15, 100), (100, 0))) == []


def test_equal_blocks_behind_different_ones_are_no_prefix() -> None:
    tables, lengths = contexts((64, 20))
    tables[:, 3] = np.arange(64) % 2 + 5000
    halves = [(list(range(first, 64, 2)), 20) for first in (0, 1)]
    assert found(tables, lengths) == halves


ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 2), min_size=6, max_size=6), st.integers(1, 6 * 4)),
    min_size=1,
    max_size=14,
)


@given(rows=ROWS)
def test_prefixes_are_blocks_that_their_rows_have_in_common(
    rows: list[tuple[list[int], int]],
) -> None:
    """Few blocks and short prefixes, so that most draws share something."""
    tables = np.array([blocks for blocks, _ in rows], dtype=np.int32)
    lengths = np.array([length for _, length in rows], dtype=np.int32)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LEAST_ROWS", 3), ("LEAST_TOKENS", 4), ("LEAST_SHARERS", 2)):
            patch.setattr(shared_prefixes, name, value)
        prefixes = find_prefixes(tables, lengths, block_size=4)
        assert len(prefixes) <= most_prefixes(len(rows))
    owned = [row for prefix in prefixes for row in prefix.rows.tolist()]
    assert len(set(owned)) == len(owned)
    for prefix in prefixes:
        assert len(prefix.rows) >= 2
        assert sorted(prefix.rows.tolist()) == prefix.rows.tolist()
        assert (
            tables[prefix.rows, : prefix.blocks] == tables[prefix.rows[0], : prefix.blocks]
        ).all()
        assert 1 <= prefix.blocks <= ((lengths[prefix.rows] - 1) // 4).min()
    whole = _shared_by_all(tables, lengths)
    if len(rows) >= 3 and whole:
        saved = sum(prefix.saved_blocks for prefix in prefixes)
        assert saved >= (len(rows) - 1) * whole, "what all share is read once at least"


def _shared_by_all(tables: Integers, lengths: Integers) -> int:
    most = int((lengths.min() - 1) // 4)
    equal = (tables[:, :most] == tables[0, :most]).all(axis=0)
    return most if equal.all() else int(equal.argmin())
