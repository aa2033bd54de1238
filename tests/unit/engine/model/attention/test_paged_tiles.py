"""Tiles of the attention kernels fit every shape, and their scratch is bounded."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.model.attention.paged_tiles import count_splits, decode_tile, prefill_tile

rows = st.integers(1, 8192)
head_dims = st.integers(8, 128).map(lambda half: 2 * half)


@given(
    rows, st.integers(1, 16), st.integers(1, 16), head_dims, st.integers(6, 20), st.integers(1, 192)
)
def test_parts_of_contexts_stay_in_their_memory(
    rows: int, kv_heads: int, group: int, head_dim: int, exponent: int, multiprocessors: int
) -> None:
    """A large batch of long contexts must not take the memory that the KV cache has not left."""
    heads = kv_heads * group
    splits = count_splits(
        rows * kv_heads,
        rows,
        heads,
        head_dim,
        1 << exponent,
        multiprocessors=multiprocessors,
    )
    assert splits.bit_count() == 1
    assert splits == 1 or 4 * splits * rows * heads * head_dim <= 64 << 20


@pytest.mark.parametrize("multiprocessors", [58, 108, 132, 148, 188])
def test_one_long_context_fills_every_gpu(multiprocessors: int) -> None:
    """A constant of one GPU would leave a part of a larger one idle."""
    splits = count_splits(8, 1, 32, 128, 1 << 16, multiprocessors=multiprocessors)
    assert 8 * splits >= multiprocessors


def test_context_is_divided_for_the_multiprocessors_that_there_are() -> None:
    """More parts than a small GPU runs at once only have to be merged."""
    parts = [
        count_splits(8, 1, 32, 128, 1 << 14, multiprocessors=count, evens=False)
        for count in (20, 40, 80, 160)
    ]
    assert parts == [4, 8, 16, 32]


def test_short_contexts_stay_whole() -> None:
    assert count_splits(8, 1, 32, 128, 128, multiprocessors=132) == 1


@given(st.integers(1, 128), head_dims)
def test_tiles_hold_every_group_of_heads(group: int, head_dim: int) -> None:
    for tile in (decode_tile(group, head_dim), prefill_tile(group, head_dim)):
        assert tile.rows.bit_count() == 1
        assert tile.rows >= 16
        assert 1 <= tile.heads <= tile.rows
        assert 64 % tile.keys == 0


@given(st.integers(1, 128))
def test_tiles_of_wide_heads_fit_the_shared_memory_of_an_l4(group: int) -> None:
    """Else the engine ends at start with Triton's "out of resource"."""
    for tile in (decode_tile(group, 512), prefill_tile(group, 512)):
        keys_and_values = 2 * tile.keys * tile.stages
        assert 2 * 512 * (tile.rows + keys_and_values) <= 99 << 10
