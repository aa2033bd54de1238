"""FP8 on a GPU: kernels in Triton's interpreter, torch's FP8 product on the CPU."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig, Qwen3MoeConfig

import services.engine.model.attention
from services.common.settings import StartupError
from services.engine.model import loader
from services.engine.model.architecture.activation import SWIGLU
from services.engine.model.decoder import Decoder
from services.engine.model.mixers.attention import AttentionWeights
from services.engine.model.model import Model
from services.engine.model.operators.composed_projections import AdaptedProjection
from services.engine.model.operators.fp8_weights import FP8, Fp8Rounding, Fp8Weight
from services.engine.model.operators.interface import ExpertWeights, Projection
from services.engine.model.operators.torch_operators import TorchOperators
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.checkpoints.shapes import SHAPE, WIDE
from tests.unit.engine.fp8_checkpoints import LAYOUTS, in_blocks, quantize

activations = pytest.importorskip("services.engine.model.operators.fp8_rounding")
products = pytest.importorskip("services.engine.model.operators.fp8_products")
plans = pytest.importorskip("services.engine.model.operators.fp8_plan")
operators = pytest.importorskip("services.engine.model.operators.fp8_operators")
interpreted = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
FLOAT32 = torch.float32
GROUP = 64
BY_OUTPUT, BY_GROUP = Fp8Rounding(), Fp8Rounding(GROUP)
LAYOUTS_AND_BLOCKS = LAYOUTS | {"blocks": in_blocks(32, GROUP)}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE, attention_bias=True),
    "qwen3 moe": Qwen3MoeConfig(
        **WIDE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32
    ),
}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decoded(numbers: Tensor, scales: Tensor, group: int) -> Tensor:
    """Return the numbers times the scales of their rows and groups."""
    return numbers.float() * scales.repeat_interleave(group, 1)[:, : numbers.shape[1]]


def weight_of(rounded: Fp8Weight, rounding: Fp8Rounding) -> Tensor:
    group = rounding.group_inputs(rounded.numbers.shape[1])
    return decoded(rounded.numbers, rounded.scales.T, group)


@interpreted
@pytest.mark.parametrize("group", [None, GROUP])
def test_activations_round_as_in_torch(group: int | None) -> None:
    """The largest number of a row or group becomes 448; zeros stay zeros."""
    rows = random(6, 1100) * torch.tensor([1, 1e-4, 300, 0, 1, 1])[:, None]
    rows *= torch.logspace(-4, 0, 1100)  # many become subnormal
    rounded = activations.round_rows(rows, group)
    if group is None:
        largest = rows.abs().amax(dim=1, keepdim=True)
    else:
        padded = torch.nn.functional.pad(rows, (0, -1100 % group))
        largest = padded.view(6, -1, group).abs().amax(dim=2)
    expected = torch.where(largest > 0, largest / 448, 1)
    torch.testing.assert_close(rounded.scales, expected, atol=0, rtol=1e-6)
    exact = rows / rounded.scales.repeat_interleave(group or 1100, 1)[:, :1100]
    assert torch.equal(rounded.numbers.view(torch.uint8), exact.to(FP8).view(torch.uint8))


@interpreted
@pytest.mark.parametrize("group", [None, GROUP])
def test_nan_and_infinity_stay_in_their_row(group: int | None) -> None:
    """Otherwise the request would go on with wrong tokens, or others would fail with it.

    Tensor cores multiply NaN to NaN. The interpreter takes FP8's NaN for 480.
    """
    rows = random(4, 128)
    rows[1, 5], rows[2, 100] = torch.nan, torch.inf
    numbers = activations.round_rows(rows, group).numbers
    assert numbers.float().isnan().nonzero().tolist() == [[1, 5], [2, 100]]


def test_weights_of_fp8_checkpoints_keep_their_numbers() -> None:
    """Rounding them again would add as much error as the first rounding made."""
    weight = random(64, 256) * random(64, 1).exp()
    by_tensor = (weight.abs().max() / 448).expand(64, 1)
    by_output = weight.abs().amax(dim=1, keepdim=True) / 448
    by_block = weight.view(2, 32, 4, 64).abs().amax(dim=(1, 3)).repeat_interleave(32, 0) / 448
    for scales, group in ((by_tensor, 256), (by_output, 256), (by_block, GROUP)):
        stored = decoded((weight / scales.repeat_interleave(group, 1)).to(FP8), scales, group)
        rounding = Fp8Rounding(None if group == 256 else group)
        again = weight_of(rounding.round(stored), rounding)
        torch.testing.assert_close(again, stored, atol=0, rtol=1e-6)
        transposed = rounding.round(stored.T.contiguous().T)  # as GPT-2 stores its weights
        torch.testing.assert_close(weight_of(transposed, rounding), stored, atol=0, rtol=1e-6)


def test_rounding_uses_the_range_and_is_no_worse_than_the_usual_scale() -> None:
    weight = random(64, 512)
    weight[3] = 0
    rounded = BY_OUTPUT.round(weight)
    assert (rounded.numbers.float().abs().amax(dim=1)[weight.any(dim=1)] >= 240).all()
    scales = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-9) / 448
    usual = (weight / scales).to(FP8).float() * scales
    error = (weight_of(rounded, BY_OUTPUT) - weight).square().sum(dim=1)
    assert (error <= (usual - weight).square().sum(dim=1) * 1.0001).all()


@interpreted
@pytest.mark.parametrize("rounding", [BY_OUTPUT, BY_GROUP], ids=["outputs", "groups"])
@pytest.mark.parametrize("count", [1, 3, 40, 70])
def test_product_equals_that_of_the_rounded_numbers(rounding: Fp8Rounding, count: int) -> None:
    """With a last group that is not full, with bias, to the residual and to float32 sums."""
    weight, bias, rows = random(80, 96), random(80, seed=1), random(count, 96, seed=2)
    projection = operators.Fp8Operators(FLOAT32, CPU, rounding).projection(weight, bias)
    group = rounding.group_inputs(96)
    rounded = activations.round_rows(rows, rounding.group)
    factors = decoded(rounded.numbers, rounded.scales, group)
    exact = factors @ weight_of(rounding.round(weight), rounding).T + bias
    out, residual = torch.empty(count, 80), random(count, 80, seed=3)
    projection.into(rows, out)
    torch.testing.assert_close(out, exact, atol=1e-4, rtol=1e-5)
    total = residual.clone()
    projection.add_to(rows, total)
    torch.testing.assert_close(total, residual + exact, atol=1e-4, rtol=1e-5)
    assert projection.weight_bytes == 80 * 96 + 4 * 80 * -(-96 // group)


@interpreted
@pytest.mark.parametrize("by_descriptor", [False, True])
@pytest.mark.parametrize("count", [1, 16, 33])
def test_programs_that_share_a_tile_add_their_sums_once(count: int, by_descriptor: bool) -> None:
    """Each launch must leave the counters at zero, or the next one would never finish a tile."""
    weight, rows = random(80, 1040), random(count, 1040, seed=2)
    rounded = activations.round_rows(rows, None)
    matrix = products.Fp8Matrix.of(BY_OUTPUT.round(weight), None, None)
    tile = next(tile for tile in products.TILES if tile.rows >= count)
    tile = tile.with_descriptor() if by_descriptor else tile
    exact = decoded(rounded.numbers, rounded.scales, 1040) @ weight_of(matrix.weight, BY_OUTPUT).T
    for parts in (1, 2, 7):
        for _ in range(2):
            out = torch.full((count, 80), torch.nan)
            products.multiply(rounded, matrix, tile, parts, out, adds=False)
            torch.testing.assert_close(out, exact, atol=1e-3, rtol=1e-5)
            assert not matrix.arrivals.any()


@pytest.mark.parametrize(
    ("shape", "parts"), [((6144, 4096), 3), ((4096, 4096), 5), ((28672, 4096), 1), ((64, 256), 1)]
)
def test_parts_fill_the_multiprocessors(shape: tuple[int, int], parts: int) -> None:
    """The products of an 8B model on an H200, and one that is too small to divide."""
    outputs, _ = shape
    weight = Fp8Weight(torch.empty(shape, dtype=FP8), torch.empty(1, outputs))
    matrix = products.Fp8Matrix.of(weight, None, None)
    assert products.parts_of(matrix, products.TILES[0], 132) == parts


@interpreted
def test_row_has_the_same_product_beside_any_rows() -> None:
    """Otherwise an answer would depend on the requests that share its steps."""
    projection = operators.Fp8Operators(FLOAT32, CPU, BY_OUTPUT).projection(random(64, 1024), None)
    rows = random(64, 1024, seed=1)
    rows *= torch.logspace(-3, 3, 64)[:, None]
    alone = torch.empty(1, 64)
    projection.into(rows[:1], alone)
    for count in (2, 16, 17, 64):
        out = torch.empty(count, 64)
        projection.into(rows[:count], out)
        torch.testing.assert_close(out[:1], alone, atol=0, rtol=1e-6)


@interpreted
@pytest.mark.parametrize("rounding", [BY_OUTPUT, BY_GROUP], ids=["outputs", "groups"])
@pytest.mark.parametrize("number", [0, -1], ids=["first", "last"])
def test_measured_kernels_have_the_same_output(
    rounding: Fp8Rounding, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kernel that a measurement may choose, by the order of the candidates."""
    seen: list[str] = []

    def choose(candidates: Mapping[object, object], _: object, what: str) -> object:
        seen.append(f"{what}: {' '.join(map(str, candidates))}")
        return list(candidates)[number]

    monkeypatch.setattr(plans, "fastest", choose)
    fp8 = operators.Fp8Operators(FLOAT32, CPU, rounding)
    projection = fp8.projection(random(64, 512), None)
    rows = random(70, 512, seed=1)
    usual = [projected(projection, rows[:count]) for count in (1, 40, 70)]
    fp8.choose_kernels()
    assert [what.split(" rows")[0] for what in seen] == [
        f"FP8 product of {count}" for count in (16, 32, 64, 128, 256)
    ]
    assert all("TMA" in what for what in seen)
    for expected, count in zip(usual, (1, 40, 70), strict=True):
        torch.testing.assert_close(
            projected(projection, rows[:count]), expected, atol=1e-3, rtol=1e-5
        )


def projected(projection: Projection, rows: Tensor) -> Tensor:
    out = torch.full((len(rows), 64), torch.nan)
    projection.into(rows, out)
    return out


@interpreted
@pytest.mark.parametrize("shape", [(80, 40), (41, 64)])
def test_widths_that_fp8_products_lack_keep_the_dtype(shape: tuple[int, int]) -> None:
    weight, rows = random(*shape), random(3, shape[1], seed=1)
    out = torch.empty(3, shape[0])
    operators.Fp8Operators(FLOAT32, CPU, BY_OUTPUT).projection(weight, None).into(rows, out)
    torch.testing.assert_close(out, rows @ weight.T)


@interpreted
@pytest.mark.parametrize("rounding", [BY_OUTPUT, BY_GROUP], ids=["outputs", "groups"])
def test_experts_multiply_the_rounded_weights(rounding: Fp8Rounding) -> None:
    """Rows keep their dtype there, so the output is that of the loop over rounded weights."""

    def expert(seed: int, *, rounds: bool) -> ExpertWeights:
        gate, up, down = random(96, 72, seed=seed), random(96, 72, seed=seed + 1), random(72, 96)
        if rounds:
            gate, up, down = (weight_of(rounding.round(w), rounding) for w in (gate, up, down))
        return ExpertWeights(gate, up, down, random(96), random(96), random(72))

    rows, factors = random(20, 72), random(20, 2, seed=1).sigmoid()
    chosen = torch.stack((torch.arange(20) % 3, torch.full((20,), 3)), dim=1)
    fp8 = operators.Fp8Operators(FLOAT32, CPU, rounding)
    out, expected = torch.zeros(20, 72), torch.zeros(20, 72)
    mixture = fp8.mixture([expert(i, rounds=False) for i in range(4)], 4, 2, SWIGLU)
    mixture.add_to(rows, chosen, factors, out)
    plain = TorchOperators(FLOAT32, CPU)
    loop = plain.mixture([expert(i, rounds=True) for i in range(4)], 4, 2, SWIGLU)
    loop.add_to(rows, chosen, factors, expected)
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)
    assert mixture.weight_bytes < 0.3 * loop.weight_bytes


def load_fp8(path: Path, monkeypatch: pytest.MonkeyPatch, weights: str = "full") -> Decoder:
    """Load as on a GPU that multiplies FP8, but for float32."""
    monkeypatch.setattr(loader, "native", None)
    monkeypatch.setattr(services.engine.model.attention, "native", None)
    monkeypatch.setattr(loader, "multiplies_fp8", lambda *_: True)
    decoder = loader.load_model(path, FLOAT32, weights=weights)
    assert isinstance(decoder, Decoder)
    return decoder


def assert_close(decoder: Model, expected: Tensor, tokens: Tensor) -> None:
    driver = Driver(decoder, [tokens])
    driver.step([(0, len(tokens) - 1)])
    driver.step([(0, 1)])
    assert (driver.logits[0] - expected).abs().median() < 0.1 * expected.std()


@interpreted
@pytest.mark.parametrize(
    ("family", "layout"), [("llama", "tensors"), ("llama", "channels"), ("qwen3 moe", "blocks")]
)
def test_fp8_checkpoint_stays_fp8(
    family: str, layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for the layers that it leaves out, which keep every bit."""
    model = make_checkpoint(tmp_path, CONFIGS[family])
    quantize(tmp_path, model, LAYOUTS_AND_BLOCKS[layout])
    decoder = load_fp8(tmp_path, monkeypatch)
    tokens = random_tokens(12, 1)
    assert_close(decoder, reference_logits(model, tokens), tokens)
    parameters, tensors = dict(model.named_parameters()), load_file(tmp_path / "model.safetensors")
    for index, layer in enumerate(decoder._weights.layers):
        name = f"model.layers.{index}.self_attn.o_proj.weight"
        assert isinstance(layer.mixer, AttentionWeights)
        projection = layer.mixer.output
        assert isinstance(projection, AdaptedProjection)
        output = projection.base
        is_rounded = isinstance(output, operators.Fp8Projection)
        assert is_rounded == (index > 0) == (tensors[name].dtype == FP8)
        if isinstance(output, operators.Fp8Projection):
            weight: Fp8Weight = output.matrix.weight
            group = BY_GROUP.group if layout == "blocks" else None
            mine = weight_of(weight, Fp8Rounding(group))
            torch.testing.assert_close(mine, parameters[name].detach(), atol=0, rtol=1e-6)
    assert not isinstance(decoder._weights.output, operators.Fp8Projection)


@interpreted
def test_full_checkpoint_is_rounded_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--weights fp8: all products but the logits' and the router's."""
    model = make_checkpoint(tmp_path, CONFIGS["qwen3 moe"])
    whole = loader.load_model(tmp_path, FLOAT32)
    decoder = load_fp8(tmp_path, monkeypatch, "fp8")
    tokens = random_tokens(12, 1)
    assert_close(decoder, reference_logits(model, tokens), tokens)
    exact = 97 * 64 * 4  # the logits' weight
    assert decoder.weight_bytes - exact < 0.4 * (whole.weight_bytes - exact)
    assert not isinstance(decoder._weights.output, operators.Fp8Projection)


def test_machine_that_lacks_fp8_refuses_it_but_reads_checkpoints(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    with pytest.raises(StartupError, match=r"^--weights fp8 needs a GPU .* without it\.$"):
        loader.load_model(tmp_path, torch.bfloat16, weights="fp8")
