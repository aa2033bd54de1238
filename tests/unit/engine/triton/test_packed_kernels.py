"""Products with packed weights: in Triton's interpreter, beside the decoded weights in float32."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from safetensors.torch import save_file
from torch import Tensor

from services.common.gguf.ggml_types import GgmlType
from services.engine.model.checkpoint.gguf_groups import has_codes, read_groups
from services.engine.model.checkpoint.quantized import GroupNumbers, QuantizedWeight
from services.engine.model.checkpoint.stored_weights import GPU_BITS, StoredWeights
from tests.unit.engine.gguf_checkpoints import random_blocks

kernels = pytest.importorskip("services.engine.model.operators.packed_kernels")
plans = pytest.importorskip("services.engine.model.operators.packed_plan")
from services.engine.model.operators.packed_weights import (  # noqa: E402
    PackedForm,
    PackedWeight,
    StoredCodes,
    alike_runs,
)

interpreted = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
OUTPUTS = 72
"""Number that no tile divides"""
K = GGMLQuantizationType


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def halves(outputs: int, count: int, seed: int = 1) -> Tensor:
    return (torch.rand(outputs, count, generator=source(seed)) + 0.1).half()


def codes_of(outputs: int, inputs: int, bits: int) -> Tensor:
    """Return random codes, among them all that there are."""
    codes = torch.randint(2**bits, (outputs, inputs), generator=source(bits), dtype=torch.uint8)
    codes.view(-1)[: 2**bits] = torch.arange(2**bits, dtype=torch.uint8)
    return codes


def gptq(bits: int, group: int, inputs: int = 512, outputs: int = OUTPUTS) -> QuantizedWeight:
    """Make a weight whose groups have zero points, the largest among them."""
    scales = halves(outputs, inputs // group).float()
    zeros = torch.randint(2**bits, scales.shape, generator=source(3))
    zeros[0, 0] = 2**bits - 1
    codes = codes_of(outputs, inputs, bits)
    return QuantizedWeight(codes, bits, GroupNumbers(scales), GroupNumbers(-zeros * scales))


def symmetric(
    bits: int, group: int, inputs: int = 512, dtype: torch.dtype = FLOAT16
) -> QuantizedWeight:
    scales = halves(OUTPUTS, inputs // group).to(dtype).float()
    return QuantizedWeight(codes_of(OUTPUTS, inputs, bits), bits, GroupNumbers(scales))


def looked_up(values: tuple[float, ...]) -> QuantizedWeight:
    scales = GroupNumbers(torch.rand(OUTPUTS, 8, generator=source()))
    return QuantizedWeight(codes_of(OUTPUTS, 512, 4), 4, scales, values=values)


def of_gguf(kind: GGMLQuantizationType, inputs: int = 512) -> QuantizedWeight:
    blocks = random_blocks((OUTPUTS, inputs), kind)
    if kind is K.MXFP4:  # powers of two near 1
        blocks.reshape(-1, GGML_QUANT_SIZES[kind][1])[:, 0] = np.uint8(125)
    weight = read_groups(blocks, GgmlType(kind))
    assert weight is not None
    return weight


NF4 = tuple((torch.linspace(-1, 1, 16) ** 3).tolist())
WEIGHTS: dict[str, Callable[[], QuantizedWeight]] = {
    "zero points": lambda: gptq(4, 128),
    "zero points, 8 bits": lambda: gptq(8, 64),
    "symmetric": lambda: symmetric(4, 128),
    "symmetric, bfloat16, 8 bits": lambda: symmetric(8, 32, dtype=BFLOAT16),
    "one group": lambda: symmetric(8, 384, 384),
    "groups of two tiles": lambda: gptq(4, 512, 1024),
    "inputs that are no tile": lambda: gptq(4, 32, 352),
    "looked up": lambda: looked_up(NF4),
    **{
        kind.name: lambda kind=kind: of_gguf(kind)  # type: ignore[misc]
        for kind in (K.Q4_0, K.Q4_1, K.Q5_0, K.Q5_1, K.Q8_0, K.Q2_K, K.Q3_K, K.Q4_K, K.Q5_K)
    },
    "Q6_K": lambda: of_gguf(K.Q6_K),
    "IQ4_NL": lambda: of_gguf(K.IQ4_NL),
    "IQ4_XS": lambda: of_gguf(K.IQ4_XS),
    "MXFP4": lambda: of_gguf(K.MXFP4),
    "NVFP4": lambda: of_gguf(K.NVFP4),
    "TQ2_0": lambda: of_gguf(K.TQ2_0),
}


def packed(weight: QuantizedWeight, dtype: torch.dtype) -> PackedWeight:
    stored = StoredCodes.of(weight, CPU)
    assert stored is not None
    return PackedWeight.of([stored], dtype, CPU)


def product(
    rows: Tensor, weight: PackedWeight, bias: Tensor | None = None, tile: int = 0, parts: int = 2
) -> Tensor:
    """Return float32 products, and check that no program is left to wait for."""
    matrix = kernels.PackedMatrix.of(weight, bias)
    out = torch.full((len(rows), weight.outputs), torch.nan)
    tiles = kernels.tiles_of(weight.form, CPU)
    kernels.multiply(rows, matrix, tiles[tile], parts, out, adds=False)
    assert not matrix.arrivals.any()
    return out


@interpreted
@pytest.mark.parametrize("name", WEIGHTS)
def test_product_has_the_numbers_of_the_decoded_weight(name: str) -> None:
    """Rows have the dtype of the model; weights and sums are not rounded."""
    weight = WEIGHTS[name]()
    rows = torch.randn(3, weight.shape[1], generator=source()).to(BFLOAT16)
    exact = rows.double() @ weight.decode().double().T
    found = product(rows, packed(weight, BFLOAT16))
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6 * exact.abs().max().item())


@interpreted
@pytest.mark.parametrize("name", ["zero points, 8 bits", "Q4_K", "Q6_K", "looked up"])
def test_product_is_as_exact_in_float16(name: str) -> None:
    weight = WEIGHTS[name]()
    rows = torch.randn(3, weight.shape[1], generator=source()).to(FLOAT16)
    exact = rows.double() @ weight.decode().double().T
    found = product(rows, packed(weight, FLOAT16))
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=2e-6 * exact.abs().max().item())


@interpreted
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, BFLOAT16) for name in WEIGHTS), ("Q5_K", FLOAT16)]
)
def test_decoding_is_exact_but_for_the_last_rounding(name: str, dtype: torch.dtype) -> None:
    """Products of many rows multiply by these weights."""
    weight = WEIGHTS[name]()
    outputs = slice(5, 70)
    found = torch.empty((65, weight.shape[1]), dtype=dtype)
    kernels.decode(packed(weight, dtype), outputs.start, found)
    expected = weight.decode()[outputs].to(dtype)
    if name == "looked up":  # the last bits of float32 are missing before the rounding
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=0)
    else:
        assert torch.equal(found, expected)


@interpreted
@pytest.mark.parametrize(
    ("tile", "rows", "parts"), [(0, 8, 1), (1, 9, 4), (2, 33, 2), (3, 32, 1), (4, 70, 2)]
)
def test_every_tile_computes_the_same(tile: int, rows: int, parts: int) -> None:
    """With one tile of rows or two, and a bias."""
    weight = gptq(4, 128, 1024)
    inputs = torch.randn(rows, 1024, generator=source()).to(BFLOAT16)
    bias = torch.randn(OUTPUTS, generator=source()).to(BFLOAT16)
    exact = inputs.double() @ weight.decode().double().T + bias.double()
    found = product(inputs, packed(weight, BFLOAT16), bias, tile, parts)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-3)


@interpreted
@pytest.mark.parametrize("parts", [1, 4])
def test_product_is_added_between_other_columns(parts: int) -> None:
    """As to the residual; queries, keys and values may come from several launches."""
    weight = packed(gptq(4, 32), BFLOAT16)
    rows = torch.randn(2, 512, generator=source()).to(BFLOAT16)
    whole = torch.randn(2, OUTPUTS + 20, generator=source()).to(BFLOAT16)
    expected = whole.float()
    expected[:, 10:-10] += product(rows, weight)
    matrix, tile = kernels.PackedMatrix.of(weight, None), kernels.tiles_of(weight.form, CPU)[0]
    kernels.multiply(rows, matrix, tile, parts, whole[:, 10:-10], adds=True)
    torch.testing.assert_close(whole, expected.to(BFLOAT16), rtol=0, atol=0)


@interpreted
def test_nan_and_infinity_stay_in_their_row() -> None:
    """Otherwise all requests of the batch would fail, because rows share a tile."""
    rows = torch.randn(4, 512, generator=source()).to(BFLOAT16)
    rows[1, 5], rows[2, 100] = torch.nan, torch.inf
    for weight in (gptq(4, 128), of_gguf(K.Q4_K)):
        found = product(rows, packed(weight, BFLOAT16))
        assert found.isfinite().all(dim=1).tolist() == [True, False, False, True]


@interpreted
@pytest.mark.parametrize("count", [3, 300])
@pytest.mark.parametrize("adds", [False, True])
def test_plan_multiplies_any_number_of_rows(
    count: int, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows are multiplied by decoded weights, a few outputs at a time."""
    monkeypatch.setattr(plans, "_DECODED_BYTES", 30 * 512 * 2)
    weight = gptq(4, 128)
    bias = torch.randn(OUTPUTS, generator=source()).to(BFLOAT16)
    matrix = kernels.PackedMatrix.of(packed(weight, BFLOAT16), bias)
    rows = torch.randn(count, 512, generator=source()).to(BFLOAT16)
    out = torch.randn(count, OUTPUTS, generator=source()).to(BFLOAT16)
    numbers = weight.decode() if count < 256 else weight.decode().to(BFLOAT16).float()
    expected = rows.float() @ numbers.T + bias.float() + adds * out.float()
    plans.PackedPlan(matrix, BFLOAT16).product(count).multiply(rows, matrix, out, adds=adds)
    torch.testing.assert_close(out.float(), expected, rtol=2**-7, atol=0.1)


def test_plan_takes_the_fastest_way_that_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the parts of the first number of rows for all: sums have one order."""
    matrix = kernels.PackedMatrix.of(packed(gptq(4, 128, 4096), BFLOAT16), None)
    plan = plans.PackedPlan(matrix, BFLOAT16)
    usual = plan.product(1)
    assert [str(plan.product(count)) for count in (1, 256, 257)] == [
        f"codes, 8x64, {usual.parts} parts",
        f"codes, 64x128, {usual.parts} parts",
        "decoded weights",
    ]
    asked: list[list[str]] = []

    def fastest(candidates, default, what):  # type: ignore[no-untyped-def]
        asked.append([str(each) for each in candidates])
        return list(candidates)[-1] if len(asked) < 5 else next(iter(candidates))

    monkeypatch.setattr(plans, "fastest", fastest)
    plan.measure([matrix])
    parts = plan.product(1).parts
    assert parts != usual.parts
    assert all(names[0] == "decoded weights" for names in asked)
    assert str(plan.product(64)) == f"codes, 64x128, {parts} parts"
    assert str(plan.product(65)) == "decoded weights"


def test_numbers_take_as_few_bytes_as_they_can() -> None:
    """70 billion weights in 4 bits must fit beside a KV cache into 80 GB."""

    def bits_per_weight(weight: QuantizedWeight) -> float:
        return 8 * packed(weight, BFLOAT16).nbytes / (weight.shape[0] * weight.shape[1])

    assert bits_per_weight(symmetric(4, 128)) == 4.125
    assert bits_per_weight(gptq(4, 128)) == 4.25
    for kind in GgmlType:
        if has_codes(kind):
            stated = GPU_BITS[kind]
            assert bits_per_weight(of_gguf(GGMLQuantizationType(kind))) == stated, kind.name


def test_sizes_of_packed_weights_are_known_from_headers(tmp_path: Path) -> None:
    """`tokenwire show`, and the check before loading, state what the kernels' form takes."""
    words, scales = torch.zeros(64, OUTPUTS).int(), torch.zeros(4, OUTPUTS).half()
    of_gptq = {"qweight": words, "qzeros": torch.zeros(4, OUTPUTS // 8).int(), "scales": scales}
    codes = torch.zeros(OUTPUTS * 256, 1).byte()
    of_nf4 = {"weight": codes, "weight.absmax": torch.zeros(OUTPUTS * 8).byte()}
    pairs = ((of_gptq, gptq(4, 128)), (of_nf4, looked_up(NF4)))
    for tensors, weight in pairs:
        save_file(tensors, tmp_path / "model.safetensors")
        stated = StoredWeights.of_directory(tmp_path).on_gpu(packs=True).num_bytes("full", 2)
        assert 0.97 < stated / packed(weight, BFLOAT16).nbytes <= 1


def test_forms_that_the_kernels_lack_are_told() -> None:
    """Otherwise such weights would be read wrongly."""
    odd = QuantizedWeight(codes_of(8, 480, 4), 4, GroupNumbers(halves(8, 5)))
    assert StoredCodes.of(odd, CPU) is None
    assert StoredCodes.of(symmetric(4, 128), CPU) is not None


def test_siblings_of_almost_one_form_share_a_launch() -> None:
    """One of them may have the same zero point everywhere, or scales that need more bits."""

    def stored(weight: QuantizedWeight) -> StoredCodes:
        found = StoredCodes.of(weight, CPU)
        assert found is not None
        return found

    with_zeros, without = stored(gptq(4, 128)), stored(symmetric(4, 128))
    exact = symmetric(4, 128)
    odd = stored(QuantizedWeight(exact.codes, 4, GroupNumbers(exact.scales.float() / 3)))
    runs = list(alike_runs([with_zeros, without, odd, stored(of_gguf(K.Q6_K))]))
    assert [len(run) for run in runs] == [3, 1]
    assert {run.form for run in runs[0]} == {PackedForm(4, 128, "float32", "zero")}
    whole = torch.cat([each.weight.decode() for each in (with_zeros, without, odd)])
    found = torch.empty(whole.shape, dtype=BFLOAT16)
    if "TRITON_INTERPRET" in os.environ:
        kernels.decode(PackedWeight.of(runs[0], BFLOAT16, CPU), 0, found)
        assert torch.equal(found, whole.to(BFLOAT16))
