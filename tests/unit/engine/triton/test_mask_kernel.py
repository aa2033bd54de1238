"""Packed masks on a GPU: in Triton's interpreter."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.engine.checked_request import SamplingSettings
from services.engine.sampling.adjustments import adjust
from services.engine.sampling.row import Row

kernel = pytest.importorskip("services.engine.sampling.mask_kernel")

PLAIN = SamplingSettings(1.0, 1.0, 0, 0.0, 1)


def masked_on_cpu(logits: Tensor, masks: dict[int, bytes]) -> Tensor:
    expected = logits.clone()
    adjust(expected, [Row(PLAIN, 0, 0, mask=masks.get(i)) for i in range(len(logits))])
    return expected


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs the interpreter")
@given(
    vocabulary=st.sampled_from([1, 31, 32, 33, 1000, 1024, 1025, 2111]),
    masks=st.dictionaries(st.integers(0, 5), st.binary(max_size=300), min_size=1),
)
@settings(max_examples=12, deadline=None)
def test_kernel_excludes_the_same_ids_as_the_cpu(vocabulary: int, masks: dict[int, bytes]) -> None:
    """A mask may be short, or have bits past the vocabulary; rows without one stay as they are."""
    masks = {row: mask[: -(-vocabulary // 8)] for row, mask in sorted(masks.items())}
    logits = torch.randn(6, vocabulary)
    expected = masked_on_cpu(logits, masks)
    kernel.apply_masks(logits, masks)
    assert torch.equal(logits, expected)


def test_masked_step_copies_one_bit_for_each_id() -> None:
    masks = dict.fromkeys(range(64), b"\xff" * 16000)
    packed = kernel.pack_masks(masks, 4000, torch.device("cpu"))
    assert packed.nbytes == 64 * (16000 + 4)
