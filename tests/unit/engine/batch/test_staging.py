"""Integers of a step reach the model as they were filled in, whatever steps came before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.batch.buckets import row_bucket, table_width
from services.engine.batch.staging import Staging

STEPS = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 9), min_size=1, max_size=12)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize(("groups", "axes"), [(1, 0), (2, 0), (1, 3)])
@given(steps=STEPS)
@settings(max_examples=60)
def test_model_reads_every_step_as_it_was_filled_in(
    groups: int, axes: int, copies: bool, steps: list[tuple[int, list[int]]]
) -> None:
    """Steps of any size follow each other, over ten sequences that grow by a block at a time.

    groups: tables of each sequence; copies: as for a device with memory of its own.
    """
    staging = Staging(torch.device("cpu"), groups, axes, copies=copies)
    blocks = [[[i + group] for group in range(groups)] for i in range(10)]
    number = 0
    for tokens, owners in steps:
        for group, table in enumerate(blocks[owners[0]]):
            table.append(100 + number + group)
        tables = [table for owner in owners for table in blocks[owner]]
        fields = staging.lay_out(tokens, tables)
        filled = []
        for array in (
            fields.token_ids,
            fields.positions,
            *fields.slots,
            fields.sources,
            fields.output_rows,
            fields.query_starts,
            fields.output_starts,
            fields.context_lengths,
        ):
            number += 1
            array[:] = number
            filled.append(array.tolist())
        fields.rotary_positions[:] = number
        staged = staging.send()
        arrays = [staged.token_ids, staged.positions, *staged.slots, staged.sources]
        arrays += [staged.output_rows, staged.query_starts, staged.output_starts]
        assert [each.tolist() for each in (*arrays, staged.context_lengths)] == filled
        sizes, count = [len(array) for array in filled], len(owners)
        assert sizes == [tokens] * (4 + groups) + [count + 1] * 2 + [count]
        assert staged.rotary_positions.tolist() == [[number] * tokens] * axes
        rows = staged.block_tables.flatten(0, 1).tolist()
        assert [row[: len(table)] for row, table in zip(rows, tables, strict=True)] == tables
        assert {len(row) for row in rows} == {table_width(max(map(len, tables)))}


def test_steps_within_the_reserved_size_keep_their_address() -> None:
    staging = Staging(torch.device("cpu"))
    staging.reserve(64, 8, 100)
    places = set()
    for tokens, count in ((3, 3), (64, 8), (1, 1), (3, 3)):
        staging.lay_out(tokens, [[1]] * count)
        staged = staging.send()
        places.add(staged.block_tables.data_ptr())
    assert len(places) == 1


def test_bucket_sizes_are_few_and_waste_little() -> None:
    sizes = sorted({row_bucket(rows) for rows in range(1, 257)})
    assert sizes == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert all(row_bucket(rows) >= rows for rows in range(1, 1025))
    assert [table_width(blocks) for blocks in (1, 16, 17, 64, 65, 1000)] == [
        16,
        16,
        64,
        64,
        256,
        1024,
    ]


def test_tables_are_copied_at_the_width_in_use() -> None:
    """A short step among long contexts must not copy the tables of the longest."""
    staging = Staging(torch.device("cpu"), copies=True)
    staging.reserve(64, 8, 4000)
    staging.lay_out(8, [[1]] * 8)
    narrow = staging.send().block_tables
    assert narrow.is_contiguous()
    assert narrow.shape == (8, 1, 16)
    staging.lay_out(8, [[1]] * 8, least_blocks=100)
    wide = staging.send().block_tables
    assert wide.shape == (8, 1, 256)
    assert wide.data_ptr() == narrow.data_ptr()
