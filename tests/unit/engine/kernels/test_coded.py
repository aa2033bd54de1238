"""Lossless weight compression: products equal those of the original weights."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from services.engine.kernels.library import Format, InstructionSet
from services.engine.model.operators.tiled_operators import TiledOperators
from services.engine.model.operators.tiled_products import Packed
from tests.unit.engine.machines import restrict_kernels
from tests.unit.engine.tiles import to_tiles

STEP = 32
"""Inputs and outputs of a step, whose codes cover 16 upper bytes, here 16 powers of two"""
OUTPUTS, INPUTS = 2 * STEP, 34 * STEP


@pytest.fixture
def coding() -> Iterator[TiledOperators]:
    """Operators that compress weights: those without AMX."""
    with restrict_kernels(InstructionSet.AVX512_BF16) as native:
        yield TiledOperators(native)
        native.use_pool(0)


def numbers(shape: tuple[int, ...], least: int, most: int) -> Tensor:
    """Draw bfloat16 of any sign and significand from 2^least to 2^most."""
    sign = torch.randint(2, shape) * 2 - 1
    significand = 1 + torch.randint(128, shape) / 128
    return (sign * significand * 2.0 ** torch.randint(least, most, shape)).bfloat16()


def with_exceptions(number: int) -> Tensor:
    """Make a weight [OUTPUTS, INPUTS] with `number` exceptions in each of a few steps."""
    torch.manual_seed(number)
    weight = numbers((OUTPUTS, INPUTS), -15, 1)
    for row in range(0, OUTPUTS, STEP):
        for column in range(STEP, INPUTS, 11 * STEP):
            step = weight[row : row + STEP, column : column + STEP]
            places = torch.randperm(STEP * STEP)[:number]
            step[places // STEP, places % STEP] = numbers((number,), -60, -20)
    return weight


def products(operators: TiledOperators, packed: Packed, rows: Tensor) -> Tensor:
    out = torch.empty(len(rows), OUTPUTS)
    projection = operators.packed_projection(packed, (OUTPUTS, INPUTS), None)
    projection.into(to_tiles(rows)[: len(rows)], out)
    return out


@pytest.mark.parametrize("number", [0, 1, 11, 12, 100])
def test_products_restore_every_weight(coding: TiledOperators, number: int) -> None:
    weight = with_exceptions(number)
    packed = coding.pack((weight,))
    assert packed.format == Format.CODED
    one_by_one = torch.eye(INPUTS, dtype=torch.bfloat16)
    assert torch.equal(products(coding, packed, one_by_one).T, weight.float())
    for row in range(0, INPUTS, 41):
        alone = products(coding, packed, one_by_one[row : row + 1])
        assert torch.equal(alone[0], weight[:, row].float())


@pytest.mark.parametrize("number", [0, 1, 100])
def test_product_of_a_row_is_independent_of_other_rows(coding: TiledOperators, number: int) -> None:
    packed = coding.pack((with_exceptions(number),))
    rows = torch.randn(600, INPUTS).bfloat16()
    together = products(coding, packed, rows)
    for few in (1, 8, 9, 33):
        assert torch.equal(products(coding, packed, rows[:few]), together[:few])


@pytest.mark.parametrize("least", [-60, -17])
def test_weights_with_many_exceptions_stay_uncompressed(coding: TiledOperators, least: int) -> None:
    """Nearly all weights are exceptions, or some of every step."""
    weight = numbers((OUTPUTS, INPUTS), least, 1)
    packed = coding.pack((weight,))
    assert packed.format == Format.PACKED
    assert coding.projection(weight, None).weight_bytes == weight.nbytes
    one_by_one = torch.eye(INPUTS, dtype=torch.bfloat16)
    assert torch.equal(products(coding, packed, one_by_one).T, weight.float())


def test_normally_distributed_weights_take_12_and_a_half_bits(coding: TiledOperators) -> None:
    projection = coding.projection(torch.randn(256, 1024).bfloat16(), None)
    assert projection.weight_bytes * 8 / (256 * 1024) == 12.5
