"""Norms and activations write the FP8 rows that products read, in Triton's interpreter."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import services.engine.model.attention
from services.engine.model import loader
from services.engine.model.architecture.activation import SWIGLU
from services.engine.model.model import Model
from services.engine.model.operators.fp8_weights import Fp8Rounding
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint

activations = pytest.importorskip("services.engine.model.operators.fp8_rounding")
operators = pytest.importorskip("services.engine.model.operators.fp8_operators")
pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")


def bits(rounded: Any) -> tuple[Tensor, Tensor]:
    return rounded.numbers.view(torch.uint8), rounded.scales


def make(group: int | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return operators that may launch no kernel to round rows."""

    def refuse(*_: object) -> None:
        raise AssertionError("rounded by a kernel of its own")

    monkeypatch.setattr(operators, "round_rows", refuse)
    return operators.Fp8Operators(torch.float32, CPU, Fp8Rounding(group))


def load(name: str, path: Path, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Load a random checkpoint as on a GPU that multiplies FP8, but for float32."""
    torch.manual_seed(0)
    make_checkpoint(path, CONFIGS[name])
    monkeypatch.setattr(loader, "native", None)
    monkeypatch.setattr(services.engine.model.attention, "native", None)
    monkeypatch.setattr(loader, "multiplies_fp8", lambda *_: True)
    return loader.load_model(path, torch.float32, weights="fp8")


@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("width", [48, 1100])
def test_norm_rounds_its_output(
    group: int | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, out = torch.randn(3, width), torch.empty(3, width)
    rows[1] *= 1e-4
    fp8 = make(group, monkeypatch)
    fp8.rms_norm(rows, torch.randn(width), 1e-5, out)
    expected = activations.round_rows(out, group)
    for ours, theirs in zip(bits(fp8.rounded(out)), bits(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("group", [None, 32, 128])
@pytest.mark.parametrize("width", [48, 2100])
def test_activation_rounds_its_output(
    group: int | None, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, out = torch.randn(3, 2 * width), torch.empty(3, width)
    fp8 = make(group, monkeypatch)
    fp8.activate(product, SWIGLU, out)
    expected = activations.round_rows(out, group)
    for ours, theirs in zip(bits(fp8.rounded(out)), bits(expected), strict=True):
        assert torch.equal(ours, theirs)


def test_rows_that_were_written_since_are_rounded_anew() -> None:
    fp8 = operators.Fp8Operators(torch.float32, CPU, Fp8Rounding())
    first, second = torch.randn(2, 64), torch.randn(2, 64)
    projection, out = fp8.projection(torch.randn(64, 64), None), torch.empty(2, 64)
    weight = torch.ones(64)
    changes: dict[str, Callable[[], None]] = {
        "another kernel": lambda: fp8.arrange(second, out),
        "a product": lambda: projection.into(second, out),
        "a norm that adds": lambda: fp8.add_rms_norm(second, weight, 1e-5, out),
    }
    for what, change in changes.items():
        fp8.rms_norm(first, weight, 1e-5, out)
        change()
        expected = bits(activations.round_rows(out, None))
        assert torch.equal(bits(fp8.rounded(out))[0], expected[0]), what


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gemma3", "olmo2", "qwen3 moe", "deepseek v2", "falcon h1", "gemma3n"),
        *("zamba2", "lfm2", "cohere, norms"),
    ],
)
def test_products_read_what_the_family_has_written_last(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that change after their norm, but not through operators, would be missed."""
    find = operators.Fp8Operators.rounded
    read = []

    def checked(self: Any, rows: Tensor) -> Any:
        newest = self._newest
        found = find(self, rows)
        read.append(newest is not None and found is newest[1])
        expected = activations.round_rows(rows, self._rounding.group)
        for ours, theirs in zip(bits(found), bits(expected), strict=True):
            assert torch.equal(ours, theirs)
        return found

    monkeypatch.setattr(operators.Fp8Operators, "rounded", checked)
    decoder = load(name, tmp_path, monkeypatch)
    driver = Driver(decoder, [random_tokens(20, 1), random_tokens(20, 2)])
    driver.step([(0, 5)])
    driver.step([(0, 1), (1, 4)])
    driver.step([(0, 1), (1, 1)])
    assert any(read)
