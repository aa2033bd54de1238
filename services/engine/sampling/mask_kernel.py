"""Triton kernel that applies packed masks to rows of logits on a GPU."""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.batch.transfer import staging_buffer, to_device

__all__ = ["apply_masks"]

_IDS = 1024
"""Number of ids of a program: 32 words of a mask"""


def apply_masks(logits: Tensor, masks: Mapping[int, bytes]) -> None:
    """Set the logits of ids that a mask excludes to -inf, in place.

    logits: float32 [rows, vocabulary], contiguous. masks: by row, bit i, least significant first,
    allows id i; missing bits are zeros. One copy moves ceil(vocabulary / 32) + 1 words for each
    masked row to the device; nothing waits for it.
    """
    vocabulary = logits.shape[1]
    words = -(-vocabulary // 32)
    packed = pack_masks(masks, words, logits.device)
    grid = (triton.cdiv(vocabulary, _IDS), len(masks))
    _exclude[grid](logits, to_device(packed, logits.device), vocabulary, words + 1, width=_IDS)


def pack_masks(masks: Mapping[int, bytes], words: int, device: torch.device) -> Tensor:
    """Return a row number and a mask of `words` words for each mask: int32 [masks, 1 + words]."""
    packed = staging_buffer((len(masks), 1 + words), torch.int32, device)
    rows = packed.numpy()
    rows[:, 0] = list(masks)
    as_bytes, size = rows.data.cast("B"), 4 * words
    begin = 4
    for mask in masks.values():
        given = mask if len(mask) <= size else mask[:size]
        end = begin + len(given)
        as_bytes[begin:end] = given
        as_bytes[end : begin + size] = bytes(begin + size - end)
        begin += 4 + size
    return packed


@triton.jit  # type: ignore[untyped-decorator]
def _exclude(  # type: ignore[no-untyped-def]
    logits,  # float32 [rows, vocabulary]
    packed,  # int32 [masks, stride]
    vocabulary,
    stride,
    width: tl.constexpr,
):
    """Apply 32 words of one mask. Grid: parts of the vocabulary, masks."""
    mask = packed + tl.program_id(1).to(tl.int64) * stride
    row = tl.load(mask).to(tl.int64)
    ids = tl.program_id(0) * width + tl.arange(0, width)
    is_id = ids < vocabulary
    word = tl.load(mask + 1 + ids // 32, mask=is_id, other=0)
    is_excluded = ((word >> (ids % 32)) & 1) == 0
    tl.store(logits + row * vocabulary + ids, float("-inf"), mask=is_id & is_excluded)
