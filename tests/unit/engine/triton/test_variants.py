"""Kernels compile before the first request: another variant would pause all streams for a second.

How many tokens a step has must not decide which variant runs.
"""

import os

import pytest
import torch

pytest.importorskip("triton")

from services.engine.batch.staging import Staging
from services.engine.checked_request import SamplingSettings
from services.engine.model.attention.cache_kernel import write_tokens
from services.engine.model.attention.fp8_pages import make_pages, numbers_of, write_fp8
from services.engine.model.operators.rotated_write import write_rotated
from services.engine.model.operators.rotation import Rotation, UnrotatedHeads
from services.engine.sampling import sampler
from services.engine.sampling.draw_kernels import mark_nan_ids, pick, pick_restricted, sum_weights
from services.engine.sampling.row import Row
from tests.unit.engine.triton.variants import Variants

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
PAGE, HEADS, KEYS, WIDTH = 64, 4, 2, 16


def test_slots_of_each_cache_group_take_one_variant() -> None:
    """An odd number of tokens moves the second group's slots to an odd multiple of 8 bytes."""
    variants, staging = Variants(), Staging(CPU, groups=2, copies=True)
    keys, values = (torch.zeros(4, PAGE, KEYS, WIDTH) for _ in range(2))
    key_pages, value_pages = (
        numbers_of(make_pages(4, PAGE, KEYS, WIDTH), PAGE, KEYS, WIDTH) for _ in range(2)
    )
    offsets = set()
    for tokens in range(1, 5):
        staging.lay_out(tokens, [[0]] * 2 * tokens).slots[:] = range(tokens)
        rows = torch.zeros(tokens, HEADS + 2 * KEYS, WIDTH)
        heads, new = rows[:, : HEADS + KEYS], rows[:, HEADS + KEYS :]
        rotation = Rotation(*(torch.zeros(tokens, WIDTH // 2) for _ in range(2)))
        for slots in staging.send().slots.unbind():
            offsets.add(slots.data_ptr() % 16)
            with variants.counted():
                write_rotated(
                    UnrotatedHeads(heads, new, rotation, None, None, 1e-6), keys, values, slots
                )
                write_tokens(new, new, keys.flatten(0, 1), values.flatten(0, 1), slots)
                write_fp8(new, new, key_pages, value_pages, slots)
    assert offsets == {0, 8}
    assert {name: len(each) for name, each in variants.of.items()} == {
        "_write_rotated": 1,
        "_write": 1,
        "_write_rounded": 1,
    }


def test_draws_of_any_number_of_rows_take_one_variant() -> None:
    variants = Variants()
    for count in range(1, 5):
        logits = torch.zeros(count, 512)
        rows = [Row(SamplingSettings(1.0, 0.9, 0, 0.0, 1), 0, i) for i in range(count)]
        columns = sampler._columns(rows, CPU)
        found, ids = sampler._candidates(logits)
        with variants.counted():
            sums = sum_weights(logits, found[:, :1], columns.scale, 256)
            drawn = pick(logits, found[:, :1], columns.scale, columns.noise, sums, 256)
            pick_restricted(found, ids, sums, columns[:5], 0, more=True)
            mark_nan_ids(logits, drawn)
    assert set(map(len, variants.of.values())) == {1}
    assert len(variants.of) == 4
