"""Triton kernel that writes a step's keys and values to the cache, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["write_tokens"]


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    keys,
    values,
    key_cache,
    value_cache,
    slots,
    token_stride,
    columns,
    width: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, width)
    inside = at < columns
    slot = tl.load(slots + token)
    source, target = token * token_stride + at, slot * columns + at
    tl.store(key_cache + target, tl.load(keys + source, mask=inside), mask=inside)
    tl.store(value_cache + target, tl.load(values + source, mask=inside), mask=inside)


def write_tokens(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write each token's keys and values to its slot.

    keys, values: [tokens, kv_heads, head_dim], views of one tensor with the same gaps between
    tokens; caches: [slots, kv_heads, head_dim], contiguous; slots: int64 [tokens].
    """
    columns = keys.shape[1] * keys.shape[2]
    if len(keys):
        _write[(len(keys),)](
            keys,
            values,
            key_cache,
            value_cache,
            slots,
            keys.stride(0),
            columns,
            width=triton.next_power_of_2(columns),
        )
