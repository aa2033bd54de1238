"""int8 weights and rows: exactness of products, closeness of models."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu
from transformers import LlamaConfig

from services.common.settings import StartupError
from services.engine.kernels.library import InstructionSet
from services.engine.model.checkpoint.fingerprint import weights_fingerprint
from services.engine.model.checkpoint.quantized import GroupNumbers, QuantizedWeight
from services.engine.model.loader import load_model
from services.engine.model.operators.rounded_operators import ByteOperators
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.checkpoints.shapes import SHAPE
from tests.unit.engine.machines import restrict_kernels
from tests.unit.engine.quantized_checkpoints import FORMATS, quantize
from tests.unit.engine.tiles import to_tiles

COUNTS = (1, 7, 16, 20, 40, 300)


@pytest.fixture(params=[InstructionSet.AVX512_BF16, InstructionSet.AMX], ids=lambda each: each.name)
def operators(request: pytest.FixtureRequest) -> Iterator[ByteOperators]:
    with restrict_kernels(request.param) as native:
        yield ByteOperators(native, rounds=True)
        native.use_pool(0)


def rounded(rows: Tensor) -> Tensor:
    """Round rows to int8 with a scale each, and back."""
    largest = rows.float().abs().amax(dim=1, keepdim=True)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0)
    return (rows.float() * inverse).round() * (largest / 127)


def stored(outputs: int, inputs: int) -> QuantizedWeight:
    codes = torch.randint(1, 256, (outputs, inputs), dtype=torch.uint8)
    return QuantizedWeight(codes, 8, GroupNumbers(torch.rand(outputs, 1) / inputs))


@pytest.mark.parametrize("shape", [(100, 64), (1000, 1024), (17, 192)], ids=str)
@pytest.mark.parametrize("count", COUNTS)
def test_products_equal_those_of_rounded_weights_and_rows(
    operators: ByteOperators, count: int, shape: tuple[int, int]
) -> None:
    torch.manual_seed(count)
    weight, bias = torch.randn(shape), torch.randn(shape[0])
    weight[0] = 0  # its scale is 0
    rows = torch.randn(count, shape[1], dtype=torch.bfloat16)
    rows[-1] = 0
    expected = rounded(rows) @ rounded(weight).T + bias
    projection = operators.projection(weight, bias)
    tiles = to_tiles(rows)[:count]

    exact = torch.full((count + 1, shape[0]), 7.0)
    projection.into(tiles, exact[:count])
    torch.testing.assert_close(exact[:count], expected, atol=2e-3, rtol=1e-4)
    assert (exact[count] == 7).all()  # nothing is written past the end

    out = torch.zeros(count, shape[0], dtype=torch.bfloat16)
    projection.add_to(tiles, out)
    torch.testing.assert_close(out.float(), expected, atol=1e-1, rtol=1e-2)
    found = torch.empty(count, dtype=torch.int64)
    projection.argmax(tiles, found)
    assert torch.equal(found, exact[:count].argmax(dim=1))


@pytest.mark.parametrize("count", [1, 40])
def test_stored_codes_are_multiplied_as_they_are(operators: ByteOperators, count: int) -> None:
    gate, up = stored(48, 128), stored(48, 128)
    rows = torch.randn(count, 128, dtype=torch.bfloat16)
    both = rounded(rows) @ torch.cat([gate.decode(), up.decode()]).T
    tiles, exact = to_tiles(rows)[:count], torch.empty(count, 96)
    operators.grouped_projection([gate, up], None).into(tiles, exact)
    torch.testing.assert_close(exact, both, atol=1e-4, rtol=1e-4)

    gate, up = gate.rows(slice(32)), up.rows(slice(32))
    first, second = (rounded(rows) @ each.decode().T for each in (gate, up))
    out = operators.empty(count, 32)
    operators.grouped_gate(gate, up, None, None).into(tiles, out)
    gated = operators.plain(out).float()
    torch.testing.assert_close(gated, silu(first) * second, atol=2e-2, rtol=2e-2)


def test_product_of_a_row_is_independent_of_other_rows(operators: ByteOperators) -> None:
    projection = operators.projection(torch.randn(64, 4096), None)
    rows = torch.randn(150, 4096, dtype=torch.bfloat16)
    together, alone = torch.empty(150, 64), torch.empty(1, 64)
    projection.into(to_tiles(rows)[:150], together)
    for row in (0, 20, 66, 149):
        projection.into(to_tiles(rows[row : row + 1])[:1], alone)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("broken", [float("nan"), float("-inf")])
def test_broken_row_gives_no_numbers_and_leaves_others_alone(
    operators: ByteOperators, broken: float
) -> None:
    projection = operators.projection(torch.randn(8, 64), None)
    rows = torch.randn(3, 64, dtype=torch.bfloat16)
    clean, out = torch.empty(3, 8), torch.empty(3, 8)
    projection.into(to_tiles(rows)[:3], clean)
    rows[1, 5] = broken
    projection.into(to_tiles(rows)[:3], out)
    assert out[1].isnan().all()
    assert torch.equal(out[[0, 2]], clean[[0, 2]])


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("family", ["llama, wide heads", "qwen3, tied", "gpt2", "olmo2", "gpt-oss"])
def test_logits_stay_close_to_those_of_full_weights(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    logits = []
    for weights in ("full", "w8a8"):
        decoder = load_model(tmp_path, torch.bfloat16, weights=weights)
        driver = Driver(decoder, [random_tokens(40, 1)])
        driver.step([(0, 39)])
        driver.step([(0, 1)])
        logits.append(torch.cat(list(driver.logits)).float())
    assert (logits[0] - logits[1]).abs().mean() < 0.08 * logits[0].std()


@pytest.mark.usefixtures("operators")
def test_checkpoint_that_rounds_rows_is_computed_so(tmp_path: Path) -> None:
    shape = SHAPE | {"hidden_size": 64, "head_dim": 32, "intermediate_size": 128}
    name = "int8 by channels, W8A8"
    quantize(tmp_path, make_checkpoint(tmp_path, LlamaConfig(**shape)), FORMATS[name])
    logits = []
    for weights in ("decoded", "full"):
        decoder = load_model(tmp_path, torch.bfloat16, weights=weights)
        driver = Driver(decoder, [random_tokens(40, 1)])
        driver.step([(0, 40)])
        logits.append(driver.logits[0].float())
    difference = (logits[0] - logits[1]).abs().mean()
    assert 1e-3 * logits[0].std() < difference < 0.08 * logits[0].std()


def test_other_machines_refuse_the_flag_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama, wide heads"])
    with pytest.raises(StartupError, match="--weights w8a8 needs a CPU with AMX or AVX-512 BF16"):
        load_model(tmp_path, torch.float32, weights="w8a8")


def test_rounded_rows_have_another_fingerprint(tmp_path: Path) -> None:
    """Answers differ, so a stream must not go on at an engine that computes otherwise."""
    make_checkpoint(tmp_path, CONFIGS["llama"])
    assert weights_fingerprint(tmp_path, "w8a8") != weights_fingerprint(tmp_path, "int8")
