"""Weights coded in fewer bytes: products read every bit of them, however unusual they are."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from services.engine.kernels.library import Format, InstructionSet
from services.engine.kernels.tiles import to_tiles
from services.engine.model.operators.native_operators import Packed, TiledOperators
from tests.unit.engine.machines import limited_to

STEP = 32
"""A step has as many inputs and outputs, and codes for 16 upper bytes: 16 powers of two here"""
OUTPUTS, INPUTS = 2 * STEP, 34 * STEP


@pytest.fixture
def coding() -> Iterator[TiledOperators]:
    """What codes weights: a machine without AMX."""
    with limited_to(InstructionSet.AVX512_BF16) as native:
        yield TiledOperators(native)
        native.use_pool(0)


def numbers(shape: tuple[int, ...], least: int, most: int) -> Tensor:
    """bfloat16 of either sign and any significand, from 2^least to 2^most."""
    sign = torch.randint(2, shape) * 2 - 1
    significand = 1 + torch.randint(128, shape) / 128
    return (sign * significand * 2.0 ** torch.randint(least, most, shape)).bfloat16()


def with_exceptions(number: int) -> Tensor:
    """A weight [OUTPUTS, INPUTS]; of a few steps so many are of other powers than the rest."""
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
def test_every_weight_comes_back(coding: TiledOperators, number: int) -> None:
    weight = with_exceptions(number)
    packed = coding.pack((weight,))
    assert packed.format == Format.CODED
    one_by_one = torch.eye(INPUTS, dtype=torch.bfloat16)
    assert torch.equal(products(coding, packed, one_by_one).T, weight.float())
    for row in range(0, INPUTS, 41):
        alone = products(coding, packed, one_by_one[row : row + 1])
        assert torch.equal(alone[0], weight[:, row].float())


@pytest.mark.parametrize("number", [0, 1, 100])
def test_a_row_does_not_feel_its_neighbours(coding: TiledOperators, number: int) -> None:
    packed = coding.pack((with_exceptions(number),))
    rows = torch.randn(600, INPUTS).bfloat16()
    together = products(coding, packed, rows)
    for few in (1, 8, 9, 33):
        assert torch.equal(products(coding, packed, rows[:few]), together[:few])


@pytest.mark.parametrize("least", [-60, -17])
def test_weights_that_decode_slowly_are_kept_as_they_are(
    coding: TiledOperators, least: int
) -> None:
    """Nearly all of them are exceptions, or some of every step."""
    weight = numbers((OUTPUTS, INPUTS), least, 1)
    packed = coding.pack((weight,))
    assert packed.format == Format.PACKED
    assert coding.projection(weight, None).weight_bytes == weight.nbytes
    one_by_one = torch.eye(INPUTS, dtype=torch.bfloat16)
    assert torch.equal(products(coding, packed, one_by_one).T, weight.float())


def test_weights_as_models_have_them_take_12_and_a_half_bits(coding: TiledOperators) -> None:
    projection = coding.projection(torch.randn(256, 1024).bfloat16(), None)
    assert projection.weight_bytes * 8 / (256 * 1024) == 12.5
