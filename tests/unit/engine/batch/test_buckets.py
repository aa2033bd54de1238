"""Sizes of padded steps on a GPU: every step that can occur finds its graph."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.batch.buckets import (
    decode_sizes,
    mixed_sizes,
    outweighs_graph,
    row_bucket,
    table_width,
)


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


@given(data=st.data(), most_rows=st.integers(1, 1024), most_blocks=st.integers(1, 4096))
def test_each_step_with_chunks_has_a_size(
    data: st.DataObject, most_rows: int, most_blocks: int
) -> None:
    """Streams with drafts and prompts of any lengths, up to 1,024 tokens."""
    sizes = mixed_sizes(2000, most_rows, most_blocks)
    assert sizes == sorted(set(sizes), reverse=True)
    chunks = data.draw(st.integers(1, min(most_rows, 200)))
    tokens = data.draw(st.integers(2 * chunks, 1024))
    decodes = data.draw(st.integers(0, min(most_rows - chunks, tokens - 2 * chunks)))
    blocks = data.draw(st.integers(1, most_blocks))
    fitting = [size for size in sizes if size.holds(tokens, decodes + chunks, chunks, blocks)]
    assert fitting
    least = fitting[-1]
    assert least.tokens <= max(16, 2 * tokens)
    assert least.sequences <= max(32, 8 * (decodes + chunks))


def test_number_of_sizes_is_bounded() -> None:
    """Each takes some MB of a GPU's memory, and a start captures all."""
    assert len(mixed_sizes(4096, 256, 2048)) == 64
    assert len(mixed_sizes(40_000, 4096, 1 << 20)) == 96
    assert len(mixed_sizes(4096, 8, 16)) == 9
    assert not mixed_sizes(8, 8, 16), "no step is that large"


def test_widest_tables_are_left_out_of_too_many_sizes() -> None:
    sizes = mixed_sizes(4096, 1024, 16_384)
    assert (1024, 1024, 4096) in {(size.tokens, size.sequences, size.width) for size in sizes}
    assert max(size.tokens for size in sizes if size.width == 16_384) < 1024


def test_long_chunk_behind_a_long_prefix_runs_without_a_graph() -> None:
    """Its attention takes most of the step, and no graph holds the fastest kernel for it."""
    assert outweighs_graph(1024, 16_384)
    assert not outweighs_graph(1024, 4096), "launches would take longer than is saved"
    assert not outweighs_graph(256, 131_072), "short chunks have one kernel"
