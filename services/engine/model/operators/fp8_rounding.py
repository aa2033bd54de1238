"""Triton kernels that round activations to FP8 (E4M3), with a scale for each row or group."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from services.engine.kernels.dependent_launch import launch_options
from services.engine.kernels.e4m3 import encode
from services.engine.kernels.grid_waits import wait_for_writes
from services.engine.model.operators.fp8_weights import FP8, LARGEST

__all__ = ["RoundedRows", "round_rows", "store_rounded"]

_COLUMNS = 4096
"""Most columns that a program of `_round_rows` reads at a time"""
_GROUPS = 8
"""Number of groups that a program of `_round_groups` rounds"""


@dataclass(frozen=True, slots=True)
class RoundedRows:
    """Rows in FP8. A number times the scale of its row, or of its group, is the activation."""

    numbers: Tensor
    """float8_e4m3fn [n, width]"""
    scales: Tensor
    """float32 [n, groups]; one group if a row has one scale"""

    @staticmethod
    def empty(rows: Tensor, group: int | None) -> "RoundedRows":
        """Allocate rounded `rows` [n, width]. group: inputs of a scale; None: one for each row."""
        count, width = rows.shape
        groups = 1 if group is None else triton.cdiv(width, group)
        return RoundedRows(
            torch.empty((count, width), dtype=FP8, device=rows.device),
            torch.empty((count, groups), dtype=torch.float32, device=rows.device),
        )


def round_rows(rows: Tensor, group: int | None) -> RoundedRows:
    """Round `rows` [n, width] with a scale for each row, or each `group` (a power of two) of a row.

    A row with NaN or infinity becomes NaN. With groups, NaN stays in its group.
    """
    count, width = rows.shape
    rounded = RoundedRows.empty(rows, group)
    numbers, options = rounded.numbers.view(torch.uint8), launch_options(rows.device)
    if group is None:
        tile = min(_COLUMNS, triton.next_power_of_2(width))
        _round_rows[(count,)](numbers, rounded.scales, rows, width, LARGEST, tile, **options)
    else:
        groups = rounded.scales.shape[1]
        grid = count, triton.cdiv(groups, _GROUPS)
        operands = numbers, rounded.scales, rows, width, groups
        _round_groups[grid](*operands, LARGEST, group, _GROUPS, **options)
    return rounded


@triton.jit  # type: ignore[untyped-decorator]
def _round_rows(
    numbers: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    largest: tl.constexpr,
    tile: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Round one row. The second reading comes from the cache."""
    wait_for_writes(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    most = tl.zeros((tile,), tl.float32)
    for first in range(0, width, tile):
        column = first + tl.arange(0, tile)
        part = tl.load(rows + row * width + column, mask=column < width, other=0.0)
        most = tl.maximum(most, tl.abs(part.to(tl.float32)))
    scale = scale_of(tl.max(most, axis=0), largest)
    tl.store(scales + row, scale)
    for first in range(0, width, tile):
        column = first + tl.arange(0, tile)
        part = tl.load(rows + row * width + column, mask=column < width, other=0.0)
        coded = encode(part.to(tl.float32) / scale)
        tl.store(numbers + row * width + column, coded, mask=column < width)


@triton.jit  # type: ignore[untyped-decorator]
def _round_groups(
    numbers: tl.tensor,
    scales: tl.tensor,
    rows: tl.tensor,
    width: tl.tensor,
    groups: tl.tensor,
    largest: tl.constexpr,
    group: tl.constexpr,
    tile: tl.constexpr,
    is_dependent: tl.constexpr,
) -> None:
    """Round some groups of one row."""
    wait_for_writes(is_dependent)
    row = tl.program_id(0).to(tl.int64)
    number = tl.program_id(1) * tile + tl.arange(0, tile)
    column = number[:, None] * group + tl.arange(0, group)[None, :]
    place = row * width + column
    part = tl.load(rows + place, mask=column < width, other=0.0).to(tl.float32)
    scale = scale_of(tl.max(tl.abs(part), axis=1), largest)
    tl.store(scales + row * groups + number, scale, mask=number < groups)
    tl.store(numbers + place, encode(part / scale[:, None]), mask=column < width)


@triton.jit  # type: ignore[untyped-decorator]
def store_rounded(
    numbers: tl.tensor,
    scales: tl.tensor,
    values: tl.tensor,
    first: tl.tensor,
    columns: tl.tensor,
    largest: tl.constexpr,
    group: tl.constexpr,
) -> None:
    """Round some values of one row, from column `first` on, and store them with their scales.

    numbers, scales: where the row begins; values: float32, 0 behind the last of `columns`; their
    number is a power of two. group: number of values that share a scale, which divides theirs.
    """
    count: tl.constexpr = values.shape[0] // group
    grouped = tl.reshape(values, (count, group))
    scale = scale_of(tl.max(tl.abs(grouped), axis=1), largest)
    number = tl.arange(0, count)
    groups = tl.cdiv(columns - first, group)
    tl.store(scales + first // group + number, scale, mask=number < groups)
    column = first + number[:, None] * group + tl.arange(0, group)[None, :]
    tl.store(numbers + column, encode(grouped / scale[:, None]), mask=column < columns)


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(most: tl.tensor, largest: tl.constexpr) -> tl.tensor:
    """Return the scale of numbers up to `most`; the scale of zeros is 1."""
    return tl.where(most > 1e-30, most / largest, 1.0)
