"""Weights in groups of codes: exactness of products, closeness of models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from torch.nn.functional import silu

from services.common.gguf.ggml_types import GgmlType
from services.common.settings import StartupError
from services.engine.kernels.library import InstructionSet, Numbers
from services.engine.model.architecture.activation import SWIGLU
from services.engine.model.checkpoint.fingerprint import weights_fingerprint
from services.engine.model.checkpoint.gguf_groups import read_groups
from services.engine.model.checkpoint.quantized import GroupNumbers, QuantizedWeight, rounded
from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model
from services.engine.model.operators.deltas import Delta
from services.engine.model.operators.grouped_operators import GroupedOperators
from services.engine.model.operators.interface import ExpertWeights
from services.engine.model.operators.torch_operators import TorchOperators
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.gguf_checkpoints import random_blocks
from tests.unit.engine.machines import restrict_kernels

CPU = torch.device("cpu")
FORMATS = [
    *((4, 16), (4, 32), (4, 64), (4, 128), (4, 768), (6, 16), (6, 32), (6, 64)),
    *((8, 16), (8, 32), (8, 128)),
]
"""Bits and groups"""
LEVELS = ((4, 16), (4, 32), (6, 16), (6, 32), (8, 32))
"""Those of ggml's blocks of 256"""
KERNELS = [
    *((bits, group, Numbers.HALVES) for bits in (4, 6, 8) for group in (16, 32)),
    *((*form, Numbers.LEVELS) for form in LEVELS),
]
"""Formats with kernels of their own"""
INPUTS = 768
BLOCKS = [
    *(GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q5_0),
    *(GGMLQuantizationType.Q5_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.Q2_K),
    *(GGMLQuantizationType.Q3_K, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q5_K),
    *(GGMLQuantizationType.Q6_K, GGMLQuantizationType.IQ4_NL, GGMLQuantizationType.IQ4_XS),
    GGMLQuantizationType.MXFP4,
]


@pytest.fixture(
    params=[InstructionSet.BASELINE, InstructionSet.AVX2, InstructionSet.AVX512],
    ids=lambda each: each.name,
)
def operators(request: pytest.FixtureRequest) -> Iterator[GroupedOperators]:
    with restrict_kernels(request.param) as native:
        yield GroupedOperators(native, torch.float32)
        native.use_pool(0)


def random_weight(
    outputs: int,
    inputs: int,
    bits: int,
    group: int,
    *,
    numbers: Numbers = Numbers.HALVES,
    zero: bool = False,
) -> QuantizedWeight:
    codes = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    scales = random_numbers(outputs, inputs, group, numbers, 1 / 64)
    offsets = None if zero else random_numbers(outputs, inputs, group, numbers, 2**bits / 128)
    return QuantizedWeight(codes, bits, scales, offsets)


def random_numbers(
    outputs: int, inputs: int, group: int, numbers: Numbers, most: float
) -> GroupNumbers:
    if numbers is Numbers.LEVELS:
        levels = torch.randint(-32, 64, (outputs, inputs // group), dtype=torch.int8)
        return GroupNumbers(levels, (torch.randn(outputs, inputs // 256) * most / 64).half())
    each = torch.rand(outputs, inputs // group) * most
    return GroupNumbers(each.half() if numbers is Numbers.HALVES else each)


def rounded_rows(rows: Tensor) -> Tensor:
    """Round rows to 8 bits with a scale for each 32 inputs, and back; outliers stay as they are."""
    blocks = rows.float().view(len(rows), -1, 32)
    sizes = blocks.abs()
    largest, rest = sizes.topk(2, dim=2).values.split_with_sizes((1, 1), dim=2)
    is_apart = (rest <= largest * (1 / 6)) & (rest >= 1e-30)
    is_outlier = is_apart & (sizes == largest)
    largest = torch.where(is_apart, rest, largest)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    coded = (blocks * inverse).round() * (largest / 127)
    return torch.where(is_outlier, blocks, coded).view(rows.shape)


def random_rows(rows: int, inputs: int) -> Tensor:
    """Make rows of which some inputs are many times as large as the others."""
    x = torch.randn(rows, inputs)
    x[:, 7::150] *= 40  # the same inputs in all rows, as in models
    for row in range(rows):
        x[row, (37 * row) % inputs] *= 100
    return x


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Values half-way between two codes may be rounded to either."""
    assert (ours - theirs).abs().mean() < 3e-3 * theirs.abs().mean()
    assert (ours - theirs).abs().max() < 0.05 * theirs.abs().max()


@pytest.mark.parametrize(
    ("bits", "group", "numbers"),
    [
        *((*form, numbers) for form in FORMATS for numbers in (Numbers.FLOATS, Numbers.HALVES)),
        *((*form, Numbers.LEVELS) for form in LEVELS),
    ],
)
@pytest.mark.parametrize("zero", [False, True])
def test_products_equal_those_of_the_decoded_weight(
    operators: GroupedOperators, bits: int, group: int, zero: bool, numbers: Numbers
) -> None:
    torch.manual_seed(group)
    for outputs, rows in ((13, 1), (40, 3), (24, 70)):
        weight = random_weight(outputs, INPUTS, bits, group, numbers=numbers, zero=zero)
        bias = torch.randn(outputs)
        projection = operators.grouped_projection([weight], bias)
        x = random_rows(rows, INPUTS)
        expected = rounded_rows(x) @ weight.decode().T + bias
        out = torch.full((rows + 1, outputs), 7.0)
        projection.into(x, out[:rows])
        assert_near(out[:rows], expected)
        projection.add_to(x, out[:rows])
        assert_near(out[:rows], 2 * expected)
        assert (out[rows] == 7).all()  # nothing is written past the end
        x, half = x.bfloat16(), torch.empty(rows, outputs, dtype=torch.bfloat16)
        expected = rounded_rows(x) @ weight.decode().T + bias
        projection.into(x, half)
        assert_near(half.float(), expected)


def test_weights_in_several_formats_are_multiplied_as_one(operators: GroupedOperators) -> None:
    """Files store queries, keys and values of one layer in different formats."""
    weights = [
        random_weight(16, INPUTS, 4, 32),
        random_weight(24, INPUTS, 4, 32),
        random_weight(12, INPUTS, 4, 32),
        random_weight(8, INPUTS, 4, 32),  # begins within a strip
        random_weight(8, INPUTS, 6, 16, numbers=Numbers.LEVELS, zero=True),
    ]
    whole, bias, x = (
        torch.cat([each.decode() for each in weights]),
        torch.randn(68),
        torch.randn(5, INPUTS),
    )
    out = torch.full((5, 70), 7.0)
    operators.grouped_projection(weights, bias).into(x, out[:, :68])
    assert_near(out[:, :68], rounded_rows(x) @ whole.T + bias)
    assert (out[:, 68:] == 7).all()


@pytest.mark.parametrize("kind", BLOCKS, ids=lambda kind: kind.name)
def test_codes_are_packed_from_the_blocks_of_a_file(
    operators: GroupedOperators, kind: GGMLQuantizationType
) -> None:
    weight = read_groups(random_blocks((40, INPUTS), kind), GgmlType(kind))
    assert weight is not None
    weights = [weight.rows(torch.randperm(40)), weight.rows(slice(3, 20))]
    x, out = random_rows(3, INPUTS), torch.empty(3, 57)
    operators.grouped_projection(weights, None).into(x, out)
    assert_near(out, rounded_rows(x) @ torch.cat([each.decode() for each in weights]).T)
    part = weight.columns(1, 3)  # of a rank
    assert part is not None
    x, out = torch.randn(3, INPUTS // 3), torch.empty(3, 40)
    operators.grouped_projection([part], None).into(x, out)
    assert_near(out, rounded_rows(x) @ part.decode().T)


@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("bits", "group", "numbers"), KERNELS)
def test_product_of_a_row_is_independent_of_other_rows(
    operators: GroupedOperators, bits: int, group: int, numbers: Numbers, zero: bool
) -> None:
    """Few rows are multiplied by other kernels than many, and some of these by the first four."""
    inputs = 1280 if numbers is Numbers.LEVELS else 1056  # no multiple of 512, a panel
    weight = random_weight(40, inputs, bits, group, numbers=numbers, zero=zero)
    projection = operators.grouped_projection([weight], None)
    x = random_rows(70, inputs)
    together, alone = torch.empty(70, 40), torch.empty(1, 40)
    projection.into(x, together)
    for row in (0, 3, 4, 63, 64, 69):
        projection.into(x[row : row + 1], alone)
        assert torch.equal(alone[0], together[row])
    for rows in (2, 3, 4, 5, 6, 7, 8, 11):
        out = torch.full((rows + 1, 43), 7.0)
        projection.into(x[:rows], out[:rows, :40])
        assert torch.equal(out[:rows, :40], together[:rows])
        assert (out[rows] == 7).all()
        assert (out[:, 40:] == 7).all()


@pytest.mark.parametrize("rows", [1, 6])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize(("bits", "group", "numbers"), KERNELS)
def test_largest_sums_of_products_are_exact(
    operators: GroupedOperators, bits: int, group: int, numbers: Numbers, zero: bool, rows: int
) -> None:
    """Sums of 16 bits would wrap around if one product more were added to them."""
    most = 2**bits - 1
    codes = torch.zeros(8, 256, dtype=torch.uint8)
    codes[1] = most
    codes[2, ::2] = codes[3, 1::2] = codes[4, : group // 2] = most
    codes[5] = torch.arange(256) % 4 // 2 * most
    codes[6] = torch.arange(256) % 2 * most
    each = torch.full((8, 256 // group), 1.0)
    scales = GroupNumbers(each)
    if numbers is Numbers.LEVELS:
        levels = torch.full(each.shape, -128, dtype=torch.int8)
        scales = GroupNumbers(levels, torch.full((8, 1), 1 / 128).half())
    weight = QuantizedWeight(codes, bits, scales, None if zero else scales)
    signs = torch.stack((torch.ones(256), -torch.ones(256), torch.arange(256) % 2 * 2.0 - 1))
    x, out = signs.repeat(2, 1)[:rows], torch.empty(rows, 8)
    operators.grouped_projection([weight], None).into(x, out)
    expected = x.double() @ weight.decode().double().T
    torch.testing.assert_close(out.double(), expected, atol=0.05, rtol=1e-5)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_row_gives_no_numbers_and_leaves_others_alone(
    operators: GroupedOperators, broken: float
) -> None:
    """Such a row ends its request; a number in its place would be taken for an answer."""
    projection = operators.grouped_projection([random_weight(8, 64, 8, 32)], None)
    x = torch.randn(3, 64)
    clean, out = torch.empty(3, 8), torch.empty(3, 8)
    projection.into(x, clean)
    x[1, 5] = broken
    projection.into(x, out)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


def test_outlier_leaves_its_neighbours_their_precision(operators: GroupedOperators) -> None:
    """Models have such inputs; answers of a model whose other inputs lose bits differ."""
    weight = random_weight(40, 256, 4, 32)
    x = torch.randn(5, 256)
    errors = []
    for largest in (1.0, 1_000.0):
        x[:, 3] = largest
        out = torch.empty(5, 40)
        operators.grouped_projection([weight], None).into(x, out)
        errors.append((out.double() - x.double() @ weight.decode().double().T).abs().mean())
    assert errors[1] < 2 * errors[0]


def test_outlier_among_tiny_numbers_is_no_reason_for_infinities(
    operators: GroupedOperators,
) -> None:
    weight = random_weight(8, 32, 8, 32)
    x = torch.full((1, 32), 1e-42)
    x[0, 9] = 3.0
    out = torch.empty(1, 8)
    operators.grouped_projection([weight], None).into(x, out)
    torch.testing.assert_close(out, 3 * weight.decode().T[9:10], atol=0, rtol=1e-2)


def test_rows_of_zeros_and_of_tiny_numbers_keep_their_precision(
    operators: GroupedOperators,
) -> None:
    weight = random_weight(8, 64, 4, 32)
    x = torch.stack((torch.zeros(64), torch.randn(64) * 1e-30, torch.randn(64) * 1e30))
    out = torch.empty(3, 8)
    operators.grouped_projection([weight], None).into(x, out)
    expected = rounded_rows(x) @ weight.decode().T
    torch.testing.assert_close(out, expected, atol=0, rtol=1e-3)


@pytest.mark.parametrize(("up_bits", "up_group"), [(4, 32), (4, 64), (6, 16), (8, 16), (0, 0)])
def test_gate_and_experts_equal_those_of_the_decoded_weights(
    operators: GroupedOperators, up_bits: int, up_group: int
) -> None:
    """Files may store the two halves of a gate in different formats."""
    gate = random_weight(96, 64, 4, 32)
    up = random_weight(96, 64, up_bits, up_group) if up_bits else None
    down = random_weight(64, 96, 8, 32)
    exact = TorchOperators(torch.float32, CPU)
    x = torch.randn(5, 64)
    if up is not None:
        ours, theirs = torch.empty(2, 5, 96)
        operators.grouped_gate(gate, up, None, None).into(x, ours)
        exact.gate(gate.decode(), up.decode(), None, None).into(rounded_rows(x), theirs)
        assert_near(ours, theirs)
    experts = [
        ExpertWeights(gate, gate if up is None else up, down, None, None, None) for _ in range(3)
    ]
    chosen, factors = torch.tensor([[0, 2]] * 5), torch.full((5, 2), 0.5)
    ours, theirs = torch.zeros(2, 5, 64)
    operators.mixture(experts, 3, 2, SWIGLU).add_to(x, chosen, factors, ours)
    exact.mixture(experts, 3, 2, SWIGLU).add_to(x, chosen, factors, theirs)
    assert (ours - theirs).abs().mean() < 0.04 * theirs.std()


class _Shift(Delta):
    """Adds 1 to every output."""

    is_active = True

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        out += 1


def test_adapter_of_a_gate_changes_what_is_activated(operators: GroupedOperators) -> None:
    gate, up = random_weight(96, 64, 4, 32), random_weight(96, 64, 6, 32)
    made, delta = operators.grouped_gate(gate, up, None, None), _Shift()
    made.adapt(delta)
    x, out = torch.randn(5, 64), torch.empty(5, 96)
    first, second = (rounded_rows(x) @ each.decode().T for each in (gate, up))
    made.into(x, out)
    assert_near(out, silu(first + 1) * (second + 1))
    delta.is_active = False
    made.into(x, out)
    assert_near(out, silu(first) * second)


@pytest.mark.parametrize("family", ["llama", "qwen3, tied", "mistral", "gemma3", "olmo2", "glm4"])
def test_replayed_decodes_compute_what_single_kernels_do(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    logits = []
    with restrict_kernels(InstructionSet.AVX2) as native:
        for replays in (True, False):
            decoder = load_model(tmp_path, torch.float32, weights="int8")
            assert isinstance(decoder, Decoder)
            recording, decoder._recording = decoder._recording, None
            driver = Driver(decoder, [random_tokens(40, 1), random_tokens(40, 2)])
            driver.step([(0, 20)])
            decoder._recording = recording if replays else None
            for rows in ([(0, 1)], [(0, 1)], [(0, 1), (1, 25)], [(0, 1), (1, 1)], [(1, 1)]):
                driver.step(rows)
            assert recording is not None
            assert (recording._operations is not None) is replays
            logits.append(torch.cat(list(driver.logits)))
        native.use_pool(0)
    assert torch.equal(*logits)


def test_parts_of_a_weight_decode_to_parts_of_its_numbers() -> None:
    weight = random_weight(24, 384, 4, 64)
    whole = weight.decode()
    part = weight.columns(1, 3)
    assert part is not None
    assert torch.equal(part.decode(), whole[:, 128:256])
    assert weight.columns(0, 4) is None  # would cut a group
    levels = random_weight(8, INPUTS, 6, 16, numbers=Numbers.LEVELS, zero=True)
    third = levels.columns(2, 3)
    assert third is not None
    assert torch.equal(third.decode(), levels.decode()[:, 512:])
    assert levels.columns(0, 2) is None  # would cut a block
    assert torch.equal(levels.rows(torch.tensor([7])).decode(), levels.decode()[[7]])
    assert torch.equal(weight.times(2).decode(), 2 * whole)
    assert torch.equal(weight.rows(torch.tensor([3, 1])).decode(), whole[[3, 1]])


@pytest.mark.parametrize(("bits", "most"), [(4, 0.12), (8, 0.006)])
def test_rounded_weight_is_near(bits: int, most: float) -> None:
    weight = torch.randn(64, 256)
    weight[0] = 0
    error = (rounded(weight, bits, 32).decode() - weight).abs().mean()
    assert error < most


@pytest.mark.parametrize("family", ["llama", "qwen3, tied", "gemma3", "gpt2", "olmo2", "phi3"])
@pytest.mark.parametrize(("weights", "most"), [("int4", 0.6), ("int8", 0.07)])
def test_logits_stay_close_to_those_of_full_weights(
    family: str, weights: str, most: float, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    tokens = random_tokens(40, 1)
    logits, sizes = [], []
    with restrict_kernels(InstructionSet.AVX2) as native:
        for each in ("decoded", weights):
            decoder = load_model(tmp_path, torch.float32, weights=each)
            driver = Driver(decoder, [tokens])
            driver.step([(0, 40)])
            logits.append(driver.logits[0])
            sizes.append(decoder.weight_bytes)
        native.use_pool(0)
    assert (logits[0] - logits[1]).abs().mean() < most * logits[0].std()
    assert sizes[1] < (0.3 if weights == "int8" else 0.25) * sizes[0]


def test_rounded_weights_need_numbers_that_the_kernels_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    with pytest.raises(StartupError, match="--weights int4 needs"):
        load_model(tmp_path, torch.float16, weights="int4")


def test_rounded_weights_have_another_fingerprint(tmp_path: Path) -> None:
    """Answers differ, so a stream must not go on at an engine with other weights."""
    make_checkpoint(tmp_path, CONFIGS["llama"])
    kinds = ("full", "decoded", "int4", "int8")
    assert len({weights_fingerprint(tmp_path, kind) for kind in kinds}) == len(kinds)
