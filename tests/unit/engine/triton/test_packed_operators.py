"""Quantized checkpoints on a GPU: loaded with packed weights, in Triton's interpreter."""

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import LlamaConfig, Qwen3MoeConfig

from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.model import loader
from services.engine.model.adapters.peft_files import PeftAdapter
from services.engine.model.architecture.activation import SWIGLU
from services.engine.model.architecture.spec import ModelSpec
from services.engine.model.checkpoint.quantized import GroupNumbers, QuantizedWeight, Weight
from services.engine.model.decoder import Decoder
from services.engine.model.operators.interface import ExpertWeights, Mixture, Operators
from services.engine.model.operators.torch_operators import TorchOperators
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.checkpoints.shapes import SHAPE, WIDE
from tests.unit.engine.gguf_checkpoints import write_gguf
from tests.unit.engine.model.adapters.adapter_folders import make_adapter
from tests.unit.engine.quantized_checkpoints import FORMATS, quantize

operators = pytest.importorskip("services.engine.model.operators.packed_operators")
kernels = pytest.importorskip("services.engine.model.operators.packed_kernels")
mixtures = pytest.importorskip("services.engine.model.operators.grouped_mixture")
interpreted = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
FLOAT32 = torch.float32
TOKENS = 12
ROOMY = SHAPE | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
"""Widths that the blocks of K-quants divide"""
MOE = Qwen3MoeConfig(**WIDE, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=32)


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load models as on a GPU, but for float32 and torch's attention."""

    def choose(
        spec: ModelSpec, dtype: torch.dtype, device: torch.device, weights: str
    ) -> Operators:
        kind = operators.PackedOperators if weights == "full" else TorchOperators
        found: Operators = kind(dtype, device)
        found.groups_experts = True
        return found

    monkeypatch.setattr(loader, "choose_operators", choose)


def load(path: Path, weights: str = "full") -> Decoder:
    decoder = loader.load_model(path, FLOAT32, weights=weights)
    assert isinstance(decoder, Decoder)
    return decoder


def logits_of(decoder: Decoder, tokens: Tensor) -> Tensor:
    driver = Driver(decoder, [tokens])
    driver.step([(0, len(tokens) - 1)])
    driver.step([(0, 1)])
    return driver.logits[0]


def codes(*shape: int, seed: int = 0) -> QuantizedWeight:
    """Make a weight in 4 bits, groups of 32 with zero points."""
    source = torch.Generator().manual_seed(seed)
    numbers = torch.randint(16, shape, generator=source, dtype=torch.uint8)
    scales = torch.rand(shape[0], shape[1] // 32, generator=source).half().float() / 16
    zeros = torch.randint(16, scales.shape, generator=source)
    return QuantizedWeight(numbers, 4, GroupNumbers(scales), GroupNumbers(-zeros * scales))


@interpreted
@pytest.mark.parametrize("name", FORMATS)
def test_checkpoint_stays_packed_and_computes_the_decoded_model(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is rounded a second time, and no format is decoded without a word."""
    model = make_checkpoint(tmp_path, LlamaConfig(**SHAPE | {"num_hidden_layers": 2}))
    quantize(tmp_path, model, FORMATS[name])
    tokens = random_tokens(TOKENS, 1)
    with caplog.at_level(logging.WARNING):
        decoder = load(tmp_path)
    assert "decoding" not in caplog.text
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(logits_of(decoder, tokens), expected, atol=2e-4, rtol=0)


@interpreted
def test_gguf_file_stays_packed(tmp_path: Path) -> None:
    """Its output projection too."""
    model = make_checkpoint(tmp_path / "checkpoint", LlamaConfig(**ROOMY))
    write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.Q8_0)
    tokens = random_tokens(TOKENS, 1)
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        decoder = load(directory)
        decoded = load(directory, "decoded")
        expected = logits_of(decoded, tokens)
        torch.testing.assert_close(logits_of(decoder, tokens), expected, atol=1e-3, rtol=0)
    assert isinstance(decoder._weights.output, operators.PackedProjection)
    assert decoder.weight_bytes < 0.3 * decoded.weight_bytes


@interpreted
def test_siblings_share_launches_where_their_forms_allow_it() -> None:
    """Each launch costs a step of one stream about two microseconds."""
    packed = operators.PackedOperators(FLOAT32, CPU)
    weights = [codes(48, 64), codes(16, 64, seed=1), codes(16, 64, seed=2)]
    joint = packed.grouped_projection(weights, None)
    assert len(joint.runs) == 1
    bytes_ = QuantizedWeight(
        torch.full((16, 64), 200, dtype=torch.uint8), 8, GroupNumbers(torch.ones(16, 2).half())
    )
    mixed = packed.grouped_projection([*weights[:2], bytes_], torch.ones(80))
    assert [outputs for outputs, _ in mixed.runs] == [slice(0, 64), slice(64, 80)]
    rows = torch.randn(3, 64)
    for product, parts, bias in ((joint, weights, 0), (mixed, [*weights[:2], bytes_], 1)):
        out = torch.empty(3, 80)
        product.into(rows, out)
        whole = torch.cat([part.decode() for part in parts])
        torch.testing.assert_close(out, rows @ whole.T + bias, atol=1e-3, rtol=1e-5)
        product.add_to(rows, out)
        torch.testing.assert_close(out, 2 * (rows @ whole.T + bias), atol=1e-3, rtol=1e-5)


@interpreted
def test_ranks_multiply_their_parts_of_a_weight() -> None:
    """Rows and columns are cut at groups; the sum over the ranks is the whole product."""
    packed, whole = operators.PackedOperators(FLOAT32, CPU), codes(64, 128)
    rows, exact = torch.randn(2, 128), torch.empty(2, 64)
    packed.grouped_projection([whole], None).into(rows, exact)
    total = torch.zeros(2, 64)
    for rank in range(2):
        part = whole.columns(rank, 2)
        assert part is not None
        some = rows[:, 64 * rank : 64 * rank + 64].contiguous()
        packed.grouped_projection([part], None).add_to(some, total)
        outputs = torch.empty(2, 32)
        mine = slice(32 * rank, 32 * rank + 32)
        packed.grouped_projection([whole.rows(mine)], None).into(rows, outputs)
        torch.testing.assert_close(outputs, exact[:, mine])
    torch.testing.assert_close(total, exact, atol=1e-4, rtol=1e-5)


@interpreted
def test_weights_without_a_kernel_are_decoded_with_a_word(
    caplog: pytest.LogCaptureFixture,
) -> None:
    odd = QuantizedWeight(
        torch.full((8, 96), 3, dtype=torch.uint8), 4, GroupNumbers(torch.ones(8, 2).half())
    )
    packed = operators.PackedOperators(FLOAT32, CPU)
    rows, out = torch.randn(2, 96), torch.empty(2, 8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            packed.grouped_projection([odd], None).into(rows, out)
    said = "decoding weights of 4 bits in groups of 48, which the GPU's kernels lack"
    assert [record.getMessage() for record in caplog.records] == [said]
    torch.testing.assert_close(out, rows @ odd.decode().T)


def experts(*, biased: bool) -> Iterator[ExpertWeights]:
    for number in range(4):
        bias = (torch.full((n,), number + 1.0) if biased else None for n in (40, 40, 64))
        yield ExpertWeights(
            codes(40, 64, seed=number), codes(40, 64, seed=number + 9), down(number), *bias
        )


def down(number: int) -> QuantizedWeight:
    """Make a weight whose inputs are one group."""
    weight = codes(64, 64, seed=number + 20)
    scales = torch.rand(64, 1, generator=torch.Generator().manual_seed(number)) / 16
    assert isinstance(weight.codes, Tensor)
    return QuantizedWeight(weight.codes[:, :40].contiguous(), 4, GroupNumbers(scales))


@interpreted
@pytest.mark.parametrize(("rows", "biased"), [(1, False), (9, True), (150, False)])
def test_experts_stay_packed(rows: int, biased: bool) -> None:
    """In blocks of each tile's rows, beside the loop over decoded experts."""
    mixture: Mixture = operators.PackedOperators(FLOAT32, CPU).mixture(
        experts(biased=biased), 4, 2, SWIGLU
    )
    assert isinstance(mixture, mixtures.GroupedMixture)
    loop = TorchOperators(FLOAT32, CPU).mixture(experts(biased=biased), 4, 2, SWIGLU)
    source = torch.Generator().manual_seed(rows)
    inputs, factors = (torch.rand(rows, n, generator=source) for n in (64, 2))
    chosen = torch.rand(rows, 4, generator=source).argsort(dim=1)[:, :2].contiguous()
    out, expected = torch.zeros(rows, 64), torch.zeros(rows, 64)
    mixture.add_to(inputs, chosen, factors, out)
    loop.add_to(inputs, chosen, factors, expected)
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)
    assert mixture.weight_bytes < loop.weight_bytes


def in_order(weight: Weight | None, order: Tensor) -> QuantizedWeight:
    assert isinstance(weight, QuantizedWeight)
    return replace(weight, order=order)


@interpreted
@pytest.mark.parametrize("shared", [True, False])
def test_experts_read_their_inputs_in_orders_of_their_own(
    shared: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Gate and up of an expert share an order; otherwise they are decoded with a word."""

    def ordered() -> Iterator[ExpertWeights]:
        source = torch.Generator().manual_seed(5)
        for number, each in enumerate(experts(biased=True)):
            wide, narrow = (torch.randperm(n, generator=source) for n in (64, 40))
            if number:
                own = wide if shared else wide.flip(0)
                each = replace(
                    each,
                    gate=in_order(each.gate, wide),
                    up=in_order(each.up, own),
                    down=in_order(each.down, narrow),
                )
            yield each

    with caplog.at_level(logging.WARNING):
        mixture = operators.PackedOperators(FLOAT32, CPU).mixture(ordered(), 4, 2, SWIGLU)
    assert ("decoding" in caplog.text) != shared
    loop = TorchOperators(FLOAT32, CPU).mixture(ordered(), 4, 2, SWIGLU)
    source = torch.Generator().manual_seed(1)
    inputs, factors = (torch.rand(9, n, generator=source) for n in (64, 2))
    chosen = torch.rand(9, 4, generator=source).argsort(dim=1)[:, :2].contiguous()
    out, expected = torch.zeros(9, 64), torch.zeros(9, 64)
    mixture.add_to(inputs, chosen, factors, out)
    loop.add_to(inputs, chosen, factors, expected)
    torch.testing.assert_close(out, expected, atol=1e-3, rtol=1e-4)


@interpreted
@pytest.mark.parametrize("name", ["gptq", "gptq, act-order"])
def test_experts_of_a_checkpoint(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Experts whose inputs have an order of their own stay packed, too."""
    model = make_checkpoint(tmp_path, MOE)
    quantize(tmp_path, model, FORMATS[name])
    with caplog.at_level(logging.WARNING):
        decoder = load(tmp_path)
    assert "decoding" not in caplog.text
    tokens = random_tokens(TOKENS, 1)
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(logits_of(decoder, tokens), expected, atol=1e-3, rtol=0)


@interpreted
def test_adapters_add_to_packed_products(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model", LlamaConfig(**SHAPE | {"num_hidden_layers": 2}))
    quantize(tmp_path / "model", model, FORMATS["awq"])
    decoder = load(tmp_path / "model")
    assert decoder.adapters is not None
    merged: Any = make_adapter(model, tmp_path / "adapter", 1)
    decoder.adapters.load(1, PeftAdapter.read(tmp_path / "adapter"))
    tokens = random_tokens(TOKENS, 1)
    driver = Driver(decoder, [tokens], adapters=[1])
    driver.step([(0, TOKENS)])
    expected = reference_logits(merged, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-3, rtol=0)
