"""int8 weights in tiles: exactness of products, closeness of models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from services.engine.model.checkpoint.fingerprint import weights_fingerprint
from services.engine.model.loader import load_model
from services.engine.model.operators.rounded_operators import Int8Operators
from services.engine.model.operators.torch_operators import TorchOperators
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.kernels.test_kernels import assert_finds_argmax
from tests.unit.engine.machines import TILED, restrict_kernels
from tests.unit.engine.tiles import to_rows, to_tiles

CPU = torch.device("cpu")


@pytest.fixture(params=TILED, ids=lambda each: each.name)
def int8(request: pytest.FixtureRequest) -> Iterator[Int8Operators]:
    with restrict_kernels(request.param) as native:
        yield Int8Operators(native)
        native.use_pool(0)


def rounded(weight: Tensor) -> Tensor:
    """Round a weight to int8 with a scale per output, and back."""
    largest = weight.float().abs().amax(dim=1, keepdim=True)
    # Divide tensors: torch turns 127 / tensor into a reciprocal, which rounds twice.
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    return (weight.float() * inverse).round() * (largest / 127)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(100, 64), (1000, 1024), (17, 32), (64, 2816)], ids=str)
@pytest.mark.parametrize("rows", [*range(1, 71, 3), 300, 600])
def test_products_equal_those_of_the_rounded_weight(
    int8: Int8Operators, rows: int, shape: tuple[int, int], stored: torch.dtype
) -> None:
    torch.manual_seed(rows)
    outputs, inputs = shape
    weight = (torch.randn(shape) / inputs**0.5).to(stored)
    weight[0] = 0  # its scale is 0
    bias = torch.randn(outputs).to(stored)
    x = torch.randn(rows, inputs, dtype=torch.bfloat16)
    expected = x.float() @ rounded(weight).T + bias.float()
    projection = int8.projection(weight, bias)
    x = to_tiles(x)[:rows]

    exact = torch.empty(rows, outputs)
    projection.into(x, exact)
    torch.testing.assert_close(exact, expected, atol=1e-4, rtol=1e-4)

    guarded = torch.full((rows + 1, outputs), 7.0, dtype=torch.bfloat16)
    projection.into(x, guarded[:rows])
    torch.testing.assert_close(guarded[:rows].float(), expected, atol=3e-2, rtol=3e-2)
    projection.add_to(x, guarded[:rows])
    torch.testing.assert_close(guarded[:rows].float(), 2 * expected, atol=3e-2, rtol=3e-2)
    assert (guarded[rows] == 7).all()  # nothing is written past the end


@pytest.mark.parametrize("rows", [1, 33, 300])
def test_argmax_equals_that_of_the_products(int8: Int8Operators, rows: int) -> None:
    """Greedy output depends on it."""
    assert_finds_argmax(int8, rows, 1000)


@pytest.mark.parametrize("scale", [1e-3, 1e4])
def test_tiny_and_huge_numbers_keep_their_precision(int8: Int8Operators, scale: float) -> None:
    """The kernels widen weights with another exponent bias; products must not underflow."""
    weight, x = torch.randn(32, 256), (torch.randn(3, 256) * scale).bfloat16()
    expected = x.float() @ rounded(weight).T
    exact = torch.empty(3, 32)
    int8.projection(weight, None).into(to_tiles(x)[:3], exact)
    torch.testing.assert_close(exact / scale, expected / scale, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 20, 90])
def test_gate_equals_that_of_the_rounded_weights(
    int8: Int8Operators, rows: int, biased: bool
) -> None:
    torch.manual_seed(rows)
    gate, up = torch.randn(2, 96, 64) / 8
    one, other = torch.randn(2, 96) if biased else (None, None)
    x = torch.randn(rows, 64, dtype=torch.bfloat16)
    theirs = torch.empty(rows, 96)
    ours = to_tiles(torch.zeros(rows, 96, dtype=torch.bfloat16))
    int8.gate(gate, up, one, other).into(to_tiles(x)[:rows], ours[:rows])
    reference = TorchOperators(torch.float32, CPU).gate(rounded(gate), rounded(up), one, other)
    reference.into(x.float(), theirs)
    torch.testing.assert_close(to_rows(ours)[:rows].float(), theirs, atol=3e-2, rtol=3e-2)


def test_product_of_a_row_is_independent_of_other_rows(int8: Int8Operators) -> None:
    projection = int8.projection(torch.randn(64, 1024), None)
    x = torch.randn(600, 1024, dtype=torch.bfloat16)
    together, alone = torch.empty(600, 64), torch.empty(1, 64)
    projection.into(to_tiles(x)[:600], together)
    for row in (0, 20, 599):
        projection.into(to_tiles(x[row : row + 1])[:1], alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.usefixtures("int8")
@pytest.mark.parametrize(
    "family",
    ["llama, wide heads", "qwen3", "qwen3, tied", "gemma3", "gpt2", "olmo2", "gpt-oss"],
)
def test_logits_stay_close_to_those_of_full_weights(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    tokens = random_tokens(40, 1)
    logits, sizes = [], []
    for dtype, weights in ((torch.float32, "full"), (torch.bfloat16, "int8")):
        decoder = load_model(tmp_path, dtype, weights=weights)
        driver = Driver(decoder, [tokens])
        driver.step([(0, 40)])
        logits.append(driver.logits[0])
        sizes.append(decoder.weight_bytes)
    assert (logits[0] - logits[1]).abs().mean() < 0.05 * logits[0].std()
    assert sizes[1] < 0.3 * sizes[0]


def test_int8_weights_have_another_fingerprint(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    assert weights_fingerprint(tmp_path, "int8") != weights_fingerprint(tmp_path, "full")
