"""Sizes of decode steps on a GPU: every step that can occur finds its graph."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.batch.buckets import decode_sizes, row_bucket, table_width


@given(data=st.data(), most_rows=st.integers(1, 300), num_blocks=st.integers(1, 5000))
def test_each_step_that_fits_the_cache_has_a_size(
    data: st.DataObject, most_rows: int, num_blocks: int
) -> None:
    most_blocks = data.draw(st.integers(1, 3000))
    sizes = decode_sizes(most_rows, most_blocks, num_blocks)
    assert len(set(sizes)) == len(sizes) < 100
    rows = data.draw(st.integers(1, min(most_rows, num_blocks)))
    longest = data.draw(st.integers(1, min(most_blocks, num_blocks - rows + 1)))
    assert (row_bucket(rows), table_width(longest)) in sizes


def test_largest_size_comes_first_so_that_the_others_use_its_memory() -> None:
    sizes = decode_sizes(256, 2048, 100_000)
    assert sizes[0] == (256, 4096)
    assert sizes == sorted(sizes, reverse=True)


def test_sizes_that_the_cache_can_not_hold_are_left_out() -> None:
    assert decode_sizes(8, 1000, 20) == [
        (8, 16),
        (4, 64),
        (4, 16),
        (2, 64),
        (2, 16),
        (1, 64),
        (1, 16),
    ]
