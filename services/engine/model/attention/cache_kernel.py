"""Triton kernel that writes a step's keys and values to the cache, in one launch."""

import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.dependent_launch import launch_options
from services.engine.kernels.grid_waits import wait_for_writes

__all__ = ["write_tokens"]


@triton.jit(do_not_specialize=["slots"])  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    keys,
    values,
    key_cache,
    value_cache,
    slots,
    token_stride,
    key_columns,
    value_columns,
    width: tl.constexpr,
    is_dependent: tl.constexpr,
):
    wait_for_writes(is_dependent)
    token = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, width)
    slot = tl.load(slots + token)
    source = token * token_stride + at
    key = tl.load(keys + source, mask=at < key_columns)
    tl.store(key_cache + slot * key_columns + at, key, mask=at < key_columns)
    value = tl.load(values + source, mask=at < value_columns)
    tl.store(value_cache + slot * value_columns + at, value, mask=at < value_columns)


def write_tokens(
    keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write each token's keys and values to its slot.

    keys: [tokens, kv_heads, head_dim], values: [tokens, kv_heads, value_dim], views of one tensor
    with the same gaps between tokens; caches: [slots, kv_heads, head_dim] and [slots, kv_heads,
    value_dim], contiguous; slots: int64 [tokens].
    """
    columns = [each.shape[1] * each.shape[2] for each in (keys, values)]
    if len(keys):
        _write[(len(keys),)](
            keys,
            values,
            key_cache,
            value_cache,
            slots,
            keys.stride(0),
            *columns,
            width=triton.next_power_of_2(max(columns)),
            **launch_options(keys.device),
        )
