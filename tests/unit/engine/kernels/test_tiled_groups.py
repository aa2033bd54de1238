"""Weights in groups of codes, on rows in tiles: exactness of products, closeness of models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from torch.nn.functional import silu

from services.common.gguf.ggml_types import GgmlType
from services.engine.kernels.library import InstructionSet, Numbers, instruction_set
from services.engine.model.architecture.activation import SWIGLU, Activation, Nonlinearity
from services.engine.model.checkpoint.gguf_groups import read_groups
from services.engine.model.checkpoint.quantized import GroupNumbers
from services.engine.model.loader import load_model
from services.engine.model.operators.activations import activated
from services.engine.model.operators.interface import ExpertWeights
from services.engine.model.operators.tiled_operators import TiledOperators
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.gguf_checkpoints import random_blocks
from tests.unit.engine.kernels.test_grouped import (
    BLOCKS,
    FORMATS,
    INPUTS,
    LEVELS,
    random_rows,
    random_weight,
    rounded_rows,
)
from tests.unit.engine.machines import TILED, restrict_kernels
from tests.unit.engine.tiles import to_tiles

AS_BYTES = 8
"""Rows that are multiplied as bytes everywhere; AMX multiplies more of them as bfloat16"""


@pytest.fixture(params=TILED, ids=lambda each: each.name)
def operators(request: pytest.FixtureRequest) -> Iterator[TiledOperators]:
    with restrict_kernels(request.param) as native:
        yield TiledOperators(native)
        native.use_pool(0)


def product(rows: Tensor, weight: Tensor) -> Tensor:
    """Multiply as the kernels do."""
    rows = rounded_rows(rows)
    if instruction_set() == InstructionSet.AMX and len(rows) > AS_BYTES:
        rows, weight = rows.bfloat16().float(), weight.bfloat16().float()
    return rows @ weight.T


def assert_near(ours: Tensor, theirs: Tensor, mean: float = 4e-3) -> None:
    """Values half-way between two codes may be rounded to either."""
    assert (ours.float() - theirs).abs().mean() < mean * theirs.abs().mean()
    assert (ours.float() - theirs).abs().max() < 0.05 * theirs.abs().max()


@pytest.mark.parametrize(
    ("bits", "group", "numbers"),
    [
        *((*form, numbers) for form in FORMATS for numbers in (Numbers.FLOATS, Numbers.HALVES)),
        *((*form, Numbers.LEVELS) for form in LEVELS),
    ],
)
@pytest.mark.parametrize("zero", [False, True])
def test_products_equal_those_of_the_decoded_weight(
    operators: TiledOperators, bits: int, group: int, zero: bool, numbers: Numbers
) -> None:
    torch.manual_seed(group)
    for outputs, count in ((13, 1), (40, 3), (24, 8), (100, 9), (64, 20), (33, 70), (96, 300)):
        weight = random_weight(outputs, INPUTS, bits, group, numbers=numbers, zero=zero)
        bias = torch.randn(outputs)
        projection = operators.grouped_projection([weight], bias)
        rows = random_rows(count, INPUTS).bfloat16()
        expected = product(rows, weight.decode()) + bias
        tiles = to_tiles(rows)[:count]

        exact = torch.full((count + 1, outputs), 7.0)
        projection.into(tiles, exact[:count])
        assert_near(exact[:count], expected)
        assert (exact[count] == 7).all()  # nothing is written past the end

        rounded = torch.full((count + 1, outputs), 7.0, dtype=torch.bfloat16)
        projection.into(tiles, rounded[:count])
        assert_near(rounded[:count], expected)
        projection.add_to(tiles, rounded[:count])
        assert_near(rounded[:count], 2 * expected)
        assert (rounded[count] == 7).all()


def test_products_of_whole_numbers_are_exact(operators: TiledOperators) -> None:
    """Each code reaches its own input and output."""
    weight = random_weight(40, 64, 4, 32, zero=True)
    assert isinstance(weight.scales, GroupNumbers)
    weight.scales.each.fill_(1)
    rows = torch.zeros(64, 64, dtype=torch.bfloat16)
    rows.fill_diagonal_(127)
    for count in (1, 8, 64):
        out = torch.empty(count, 40)
        operators.grouped_projection([weight], None).into(to_tiles(rows)[:count], out)
        assert torch.equal(out, 127 * weight.decode().T[:count])


def test_weights_in_several_formats_are_multiplied_as_one(operators: TiledOperators) -> None:
    """Files store queries, keys and values of one layer in different formats."""
    weights = [
        random_weight(32, INPUTS, 4, 32),
        random_weight(64, INPUTS, 4, 32),
        random_weight(12, INPUTS, 4, 32),
        random_weight(8, INPUTS, 4, 32),  # begins within a panel
        random_weight(8, INPUTS, 6, 16, numbers=Numbers.LEVELS, zero=True),
    ]
    whole, bias = torch.cat([each.decode() for each in weights]), torch.randn(124)
    projection = operators.grouped_projection(weights, bias)
    for count in (1, 40):
        rows = torch.randn(count, INPUTS, dtype=torch.bfloat16)
        expected = product(rows, whole) + bias
        for dtype in (torch.float32, torch.bfloat16):
            out = torch.full((count + 1, 124), 7.0, dtype=dtype)
            projection.into(to_tiles(rows)[:count], out[:count])
            assert_near(out[:count], expected)
            assert (out[count] == 7).all()
        projection.add_to(to_tiles(rows)[:count], out[:count])
        assert_near(out[:count], 2 * expected)


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_codes_are_packed_from_the_blocks_of_a_file(
    operators: TiledOperators, kind: GGMLQuantizationType
) -> None:
    weight = read_groups(random_blocks((64, INPUTS), kind), GgmlType(kind))
    assert weight is not None
    gate, up = weight.rows(torch.randperm(64)), weight.rows(torch.randperm(64))
    for count in (3, 40):
        rows = torch.randn(count, INPUTS, dtype=torch.bfloat16)
        tiles = to_tiles(rows)[:count]
        out = torch.empty(count, 128)
        operators.grouped_projection([gate, up], None).into(tiles, out)
        both = product(rows, torch.cat([gate.decode(), up.decode()]))
        assert_near(out, both)
        gated = operators.empty(count, 64)
        operators.grouped_gate(gate, up, None, None).into(tiles, gated)
        assert_near(operators.plain(gated), silu(both[:, :64]) * both[:, 64:])


@pytest.mark.parametrize("up_bits", [4, 6])
@pytest.mark.parametrize("count", [1, 5, 40])
@pytest.mark.parametrize(
    "activation",
    [
        SWIGLU,
        Activation(Nonlinearity.GELU),
        Activation(Nonlinearity.CLAMPED_SWIGLU, alpha=1.7, limit=2.5),
    ],
    ids=["silu", "gelu", "clamped"],
)
def test_gates_and_experts_equal_those_of_the_decoded_weights(
    operators: TiledOperators, up_bits: int, count: int, activation: Activation
) -> None:
    """Files may store the two halves of a gate in different formats."""
    torch.manual_seed(count)
    gate, up = random_weight(96, 64, 4, 32), random_weight(96, 64, up_bits, 32)
    biases = torch.randn(96), torch.randn(96)
    rows = torch.randn(count, 64, dtype=torch.bfloat16)
    first, second = (
        product(rows, weight.decode()) + bias
        for weight, bias in zip((gate, up), biases, strict=True)
    )
    tiles, out = to_tiles(rows)[:count], operators.empty(count, 96)
    operators.grouped_gate(gate, up, *biases, activation).into(tiles, out)
    expected = activated(activation, torch.cat((first, second), dim=1))
    assert_near(operators.plain(out), expected)

    down = random_weight(64, 96, 8, 32)
    experts = [ExpertWeights(gate, up, down, *biases, None) for _ in range(3)]
    chosen, factors = torch.tensor([[0, 2]] * count), torch.full((count, 2), 0.5)
    summed = torch.zeros(count, 64)
    operators.mixture(experts, 3, 2, activation).add_to(tiles, chosen, factors, summed)
    assert_near(summed, product(expected.bfloat16(), down.decode()), mean=1e-2)


@pytest.mark.parametrize("count", [1, 40])
def test_argmax_is_that_of_the_product(operators: TiledOperators, count: int) -> None:
    projection = operators.grouped_projection([random_weight(1000, 64, 8, 32)], None)
    tiles = to_tiles(torch.randn(count, 64, dtype=torch.bfloat16))[:count]
    exact, found = torch.empty(count, 1000), torch.empty(count, dtype=torch.int64)
    projection.into(tiles, exact)
    projection.argmax(tiles, found)
    assert torch.equal(found, exact.argmax(dim=1))


def test_row_is_independent_of_how_many_rows_are_multiplied_as_bytes(
    operators: TiledOperators,
) -> None:
    projection = operators.grouped_projection([random_weight(64, 1024, 4, 32)], None)
    amx = instruction_set() == InstructionSet.AMX
    most = AS_BYTES if amx else 150
    rows = torch.randn(most, 1024, dtype=torch.bfloat16)
    together, alone = torch.empty(most, 64), torch.empty(1, 64)
    projection.into(to_tiles(rows)[:most], together)
    for row in {0, 3, most // 2, most - 1}:
        projection.into(to_tiles(rows[row : row + 1])[:1], alone)
        assert torch.equal(alone[0], together[row])


def test_rows_multiplied_otherwise_differ_by_rounding_alone(operators: TiledOperators) -> None:
    """A request computes the same, whatever runs beside it."""
    projection = operators.grouped_projection([random_weight(64, 1024, 4, 32)], None)
    rows = torch.randn(200, 1024, dtype=torch.bfloat16)
    together, alone = torch.empty(200, 64), torch.empty(1, 64)
    projection.into(to_tiles(rows)[:200], together)
    for row in (0, 100, 199):
        projection.into(to_tiles(rows[row : row + 1])[:1], alone)
        assert (alone[0] - together[row]).abs().mean() < 1e-2 * alone.std()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("count", [3, 40])
def test_broken_row_gives_no_numbers_and_leaves_others_alone(
    operators: TiledOperators, broken: float, count: int
) -> None:
    """Such a row ends its request; a number in its place would be taken for an answer."""
    projection = operators.grouped_projection([random_weight(8, 64, 8, 32)], None)
    rows = torch.randn(count, 64, dtype=torch.bfloat16)
    clean, out = torch.empty(count, 8), torch.empty(count, 8)
    projection.into(to_tiles(rows)[:count], clean)
    rows[1, 5] = broken
    projection.into(to_tiles(rows)[:count], out)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_rows_of_zeros_and_of_tiny_numbers_keep_their_precision(operators: TiledOperators) -> None:
    weight = random_weight(8, 64, 4, 32)
    rows = torch.stack((torch.zeros(64), torch.randn(64) * 1e-30, torch.randn(64) * 1e30))
    rows, out = rows.bfloat16(), torch.empty(3, 8)
    operators.grouped_projection([weight], None).into(to_tiles(rows)[:3], out)
    torch.testing.assert_close(out, product(rows, weight.decode()), atol=0, rtol=1e-3)


@pytest.mark.parametrize("instructions", TILED, ids=lambda each: each.name)
@pytest.mark.parametrize(
    "family", ["llama, wide heads", "qwen3, tied", "gemma3", "gpt2", "olmo2", "gpt-oss"]
)
def test_logits_of_4_bits_stay_close_to_those_of_full_weights(
    instructions: InstructionSet, family: str, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    logits, sizes = [], []
    with restrict_kernels(instructions) as native:
        for weights in ("decoded", "int4"):
            decoder = load_model(tmp_path, torch.bfloat16, weights=weights)
            driver = Driver(decoder, [random_tokens(40, 1)])
            driver.step([(0, 39)])
            driver.step([(0, 1)])
            logits.append(torch.cat(list(driver.logits)).float())
            sizes.append(decoder.weight_bytes)
        native.use_pool(0)
    assert (logits[0] - logits[1]).abs().mean() < 0.6 * logits[0].std()
    assert sizes[1] < 0.75 * sizes[0]
