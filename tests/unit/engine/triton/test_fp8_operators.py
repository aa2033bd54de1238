"""FP8 products on a GPU: the kernel in Triton's interpreter, the product in torch on the CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

import services.engine.model.attention
from services.common.settings import StartupError
from services.engine.model import loader
from tests.unit.engine.checkpoints import CONFIGS, Driver, make_checkpoint, random_tokens

operators = pytest.importorskip("services.engine.model.operators.fp8_operators")
interpreted = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
BF16 = torch.bfloat16
COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from services.engine.model.operators.fp8_operators import _quantize

types = {"rounded": "*fp8e4nv", "scales": "*fp32", "rows": "*bf16"}
constants = {"width": 4096, "chunk": 2048}
signature = {name: types.get(name, "constexpr") for name in _quantize.arg_names}
for capability in (89, 90):
    source = ASTSource(_quantize, signature=signature, constexprs=constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    assert "cvt.rn.satfinite.e4m3x2" in compiled.asm["ptx"]
"""


def rounded_by_torch(rows: Tensor) -> tuple[Tensor, Tensor]:
    scales = rows.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / 448
    return (rows.float() / scales).to(torch.float8_e4m3fn), scales


@pytest.fixture
def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round as a GPU does: Triton's interpreter makes 16 of 31.5, and a number of NaN."""
    monkeypatch.setattr(operators, "quantize_rows", rounded_by_torch)


@interpreted
def test_each_row_has_its_own_scale() -> None:
    """The largest number becomes the largest in FP8; zeros stay zeros, and NaN stays NaN."""
    rows = torch.randn(6, 2500) * torch.tensor([1, 1e-4, 300, 0, 1, 1])[:, None]
    rows = rows.to(BF16)
    expected, expected_scales = rounded_by_torch(rows)
    rows[4, 7] = torch.nan
    scaled, scales = torch.empty(6, 2500), torch.empty(6, 1)
    operators._quantize[(6,)](scaled, scales, rows, width=2500, chunk=2048)
    assert scaled[4, 7].isnan()
    scaled[4, 7] = expected[4, 7]
    torch.testing.assert_close(scales, expected_scales, atol=0, rtol=1e-6)
    assert torch.equal(scaled.to(torch.float8_e4m3fn).float(), expected.float())


@interpreted
def test_transposed_weights_are_rounded_by_output() -> None:
    """GPT-2 stores its weights so."""
    weight = torch.randn(40, 24)
    views = (operators.quantize_rows(each) for each in (weight.T, weight.T.contiguous()))
    (rounded, scales), (expected, expected_scales) = views
    assert torch.equal(rounded.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales, expected_scales)


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 64), (41, 32), (48, 24)])
def test_product_is_close_to_bfloat16(outputs: int, inputs: int) -> None:
    """Also for widths that torch's product does not take: a vocabulary may have any size."""
    generator = torch.Generator().manual_seed(outputs)
    weight, bias = (
        torch.randn(*shape, generator=generator) for shape in ((outputs, inputs), (outputs,))
    )
    rows, base = (torch.randn(5, n, generator=generator).to(BF16) for n in (inputs, outputs))
    projection = operators.Fp8Operators(BF16, CPU).projection(weight, bias)
    expected = rows.float() @ weight.T + bias
    for dtype in (BF16, torch.float32):
        out = torch.empty(5, outputs, dtype=dtype)
        projection.into(rows, out)
        assert (out.float() - expected).std() < 0.05 * expected.std()
    total = base.clone()
    projection.add_to(rows, total)
    assert (total.float() - base.float() - expected).std() < 0.05 * expected.std()


@pytest.mark.usefixtures("rounding")
@pytest.mark.parametrize("family", ["llama", "qwen3 moe"])
def test_logits_stay_close_to_those_of_full_weights(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "native", None)
    monkeypatch.setattr(services.engine.model.attention, "native", None)
    make_checkpoint(tmp_path, CONFIGS[family])
    tokens = random_tokens(40, 1)
    logits, sizes = [], []
    for dtype in (torch.float32, BF16):
        if dtype == BF16:
            fp8 = operators.Fp8Operators(BF16, CPU)
            monkeypatch.setattr(loader, "_choose_operators", lambda *_, chosen=fp8: chosen)
        decoder = loader.load_model(tmp_path, dtype)
        driver = Driver(decoder, [tokens])
        driver.step([(0, 30)])
        driver.step([(0, 10)])
        logits.append(driver.logits[0])
        sizes.append(decoder.weight_bytes)
    assert (logits[0] - logits[1]).abs().median() < 0.25 * logits[0].std()
    assert sizes[1] < sizes[0] * (0.3 if family == "llama" else 0.5)


def test_machine_without_fp8_products_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    with pytest.raises(StartupError, match="--weights fp8 needs"):
        loader.load_model(tmp_path, BF16, weights="fp8")


def test_kernel_compiles_for_gpus() -> None:
    """It rounds to nearest, and not beyond the largest number."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
