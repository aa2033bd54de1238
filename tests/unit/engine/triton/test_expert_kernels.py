"""Mixtures of experts on a GPU: in Triton's interpreter."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor
from transformers import GptOssConfig

from services.common.model_files.checkpoint import opened_checkpoint
from services.engine.model import loader
from services.engine.model.adapters.peft_files import PeftAdapter
from services.engine.model.architecture.activation import SWIGLU, Activation, Nonlinearity
from services.engine.model.architecture.routing import Routing
from services.engine.model.checkpoint.mxfp4 import Mxfp4Weight
from services.engine.model.operators import torch_operators
from services.engine.model.operators.interface import ExpertWeights, Mixture
from services.engine.model.operators.torch_operators import TorchOperators
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import (
    make_checkpoint,
    make_packed_checkpoint,
    reference_logits,
)
from tests.unit.engine.gguf_checkpoints import write_gguf
from tests.unit.engine.model.adapters.adapter_folders import make_adapter

kernels = pytest.importorskip("services.engine.model.operators.expert_kernels")
mixtures = pytest.importorskip("services.engine.model.operators.grouped_mixture")
interpreted = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
HIDDEN, WIDTH, EXPERTS = 72, 40, 6
"""Widths that no tile divides"""
CLAMPED = Activation(Nonlinearity.CLAMPED_SWIGLU, alpha=1.702, limit=0.8)
ACTIVATIONS = {
    "silu": SWIGLU,
    "gelu": Activation(Nonlinearity.GELU),
    "relu2": Activation(Nonlinearity.RELU_SQUARED),
    "gelu_tanh": Activation(Nonlinearity.GELU_TANH),
    "clamped": CLAMPED,
    "clamped silu": Activation(Nonlinearity.CLAMPED_SILU, limit=0.8),
}


def random_experts(generator: torch.Generator, *, biased: bool) -> list[ExpertWeights]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / 5

    def bias(width: int) -> Tensor | None:
        return random(width) if biased else None

    return [
        ExpertWeights(
            *(random(WIDTH, HIDDEN), random(WIDTH, HIDDEN), random(HIDDEN, WIDTH)),
            *(bias(WIDTH), bias(WIDTH), bias(HIDDEN)),
        )
        for _ in range(EXPERTS)
    ]


def choose(generator: torch.Generator, rows: int, among: Sequence[int], per_row: int) -> Tensor:
    """Choose different experts for each row."""
    order = torch.rand(rows, len(among), generator=generator).argsort(dim=1)[:, :per_row]
    return torch.tensor(among)[order]


def grouped(experts: list[ExpertWeights], activation: Activation) -> Mixture:
    of = mixtures.GroupedMixture.of
    mixture: Mixture = of(experts, EXPERTS, 1, activation, torch.float32, CPU)
    return mixture


@interpreted
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("experts", "per_row"), [(5, 2), (8, 1), (128, 8), (3, 3)])
def test_router_chooses_as_in_torch(experts: int, per_row: int, normalized: bool) -> None:
    scores = torch.randn(9, experts) * 4
    scores[3, 0] = 200.0  # the others' parts of the softmax are 0
    plain = TorchOperators(torch.float32, CPU)
    chosen, factors = plain.choose(scores, Routing(per_row, normalized), None)
    mine, my_factors = kernels.choose_experts(scores, per_row, normalized=normalized)
    torch.testing.assert_close(my_factors, factors, atol=1e-6, rtol=1e-5)
    rows = [row for row in range(9) if row != 3]
    assert torch.equal(mine[rows], chosen[rows])
    assert mine[3, 0] == 0


@interpreted
def test_row_of_nan_chooses_experts_that_exist() -> None:
    """Otherwise the product would read weights of no expert; the request fails by its logits."""
    scores = torch.randn(4, 6)
    scores[1], scores[2, 3] = torch.nan, torch.nan
    chosen, factors = kernels.choose_experts(scores, 3, normalized=True)
    assert ((chosen >= 0) & (chosen < 6)).all()
    assert all(len(set(row)) == 3 for row in chosen.tolist())
    assert factors.isnan().all(dim=1).tolist() == [False, True, True, False]


@interpreted
@pytest.mark.parametrize(
    ("activation", "rows", "among", "per_row"),
    [
        ("silu", 1, range(EXPERTS), 2),
        ("clamped", 3, (4,), 1),  # all rows to one expert, all others without rows
        ("gelu", 7, (0, 2, 5), 3),
        ("gelu_tanh", 40, range(EXPERTS), 1),
        ("clamped", 150, (1, 3), 2),  # several blocks for each expert
        ("silu", 300, range(EXPERTS), 4),  # more choices than are read at a time, the highest tile
    ],
)
def test_grouped_product_equals_the_loop(
    activation: str, rows: int, among: Sequence[int], per_row: int
) -> None:
    """With and without biases, to a float32 sum over ranks as to the residual."""
    generator = torch.Generator().manual_seed(rows)
    experts = random_experts(generator, biased=activation != "silu")
    inputs, out = (torch.randn(rows, HIDDEN, generator=generator) for _ in range(2))
    chosen = choose(generator, rows, among, per_row)
    factors = torch.rand(rows, per_row, generator=generator)
    expected = out.clone()
    loop = TorchOperators(torch.float32, CPU).mixture(
        experts, EXPERTS, per_row, ACTIVATIONS[activation]
    )
    loop.add_to(inputs, chosen, factors, expected)
    mixture = grouped(experts, ACTIVATIONS[activation])
    mixture.add_to(inputs, chosen, factors, out)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    assert mixture.weight_bytes == loop.weight_bytes


@interpreted
def test_experts_without_weights_return_the_row() -> None:
    """LongCat-Flash; the last of the rows have no other experts."""
    generator = torch.Generator().manual_seed(4)
    experts = random_experts(generator, biased=False)
    inputs = torch.randn(9, HIDDEN, generator=generator)
    chosen = choose(generator, 9, range(EXPERTS + 3), 3)
    chosen[5:] = torch.arange(EXPERTS, EXPERTS + 3)
    factors = torch.rand(9, 3, generator=generator)
    out, expected = torch.zeros(9, HIDDEN), torch.zeros(9, HIDDEN)
    mixture = grouped(experts, ACTIVATIONS["silu"])
    mixture.returns_rows = True
    mixture.add_to(inputs, chosen, factors, out)
    loop = TorchOperators(torch.float32, CPU).mixture(experts, EXPERTS, 3, ACTIVATIONS["silu"])
    loop.add_to(inputs, chosen, factors, expected)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)


@interpreted
@pytest.mark.parametrize(("hidden", "width"), [(64, 96), (160, 32)])
def test_packed_experts_equal_decoded_ones(hidden: int, width: int) -> None:
    """All codes and many scales, groups of odd number included."""
    generator = torch.Generator().manual_seed(width)

    def random(outputs: int, inputs: int) -> Mxfp4Weight:
        groups = (outputs, inputs // 32)
        blocks = torch.randint(256, (*groups, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(100, 127, groups, generator=generator, dtype=torch.uint8)
        return Mxfp4Weight(blocks, scales)

    experts = [
        ExpertWeights(
            *(random(width, hidden), random(width, hidden), random(hidden, width)),
            *(torch.randn(size, generator=generator) for size in (width, width, hidden)),
        )
        for _ in range(EXPERTS)
    ]
    inputs = torch.randn(9, hidden, generator=generator)
    chosen = choose(generator, 9, range(EXPERTS), 3)
    factors = torch.rand(9, 3, generator=generator)
    out, expected = torch.zeros(9, hidden), torch.zeros(9, hidden)
    mixture = grouped(experts, CLAMPED)
    mixture.add_to(inputs, chosen, factors, out)
    loop = TorchOperators(torch.float32, CPU).mixture(experts, EXPERTS, 3, CLAMPED)
    loop.add_to(inputs, chosen, factors, expected)
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-5)
    assert mixture.weight_bytes < loop.weight_bytes / 4


@interpreted
def test_row_is_independent_of_the_batch() -> None:
    """Otherwise greedy output would change with the load."""
    generator = torch.Generator().manual_seed(3)
    mixture = grouped(random_experts(generator, biased=True), CLAMPED)
    inputs = torch.randn(8, HIDDEN, generator=generator)
    chosen = choose(generator, 8, range(EXPERTS), 2)
    factors = torch.rand(8, 2, generator=generator)
    together, alone = torch.zeros(8, HIDDEN), torch.zeros(8, HIDDEN)
    mixture.add_to(inputs, chosen, factors, together)
    for row in range(8):
        one = slice(row, row + 1)
        mixture.add_to(inputs[one], chosen[one], factors[one], alone[one])
    # Not exactly: the interpreter multiplies by BLAS, where a sum depends on the row's place.
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=0)


@interpreted
def test_nan_stays_in_its_row() -> None:
    """Otherwise all requests of the batch would fail, because rows share blocks."""
    generator = torch.Generator().manual_seed(3)
    mixture = grouped(random_experts(generator, biased=False), SWIGLU)
    inputs = torch.randn(8, HIDDEN, generator=generator)
    inputs[5] = torch.nan
    out = torch.zeros(8, HIDDEN)
    mixture.add_to(inputs, torch.zeros(8, 1, dtype=torch.int64), torch.ones(8, 1), out)
    assert out.isnan().any(dim=1).tolist() == [row == 5 for row in range(8)]


@pytest.fixture
def on_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have models loaded with the kernels of a GPU."""
    xformers_backend = pytest.importorskip("services.engine.model.attention.paged_backend")
    monkeypatch.setattr(xformers_backend, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(loader, "native", None)
    on_pages = lambda *model, **_: xformers_backend.PagedAttention(*model)  # noqa: E731
    monkeypatch.setattr(loader, "choose_backend", on_pages)
    monkeypatch.setattr(torch_operators, "runs_tensor_kernels", lambda *_: True)


@interpreted
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize(
    "name", ["qwen3 moe", "gpt-oss in MXFP4", "phimoe", "granite moe", "ernie moe"]
)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    """In prefills and decodes that CUDA graphs may hold."""
    if name in CONFIGS:
        model = make_checkpoint(tmp_path, CONFIGS[name])
    else:
        model = make_packed_checkpoint(tmp_path)
    decoder = loader.load_model(tmp_path, torch.float32)
    assert decoder.is_capturable
    sequences = [random_tokens(30, seed) for seed in range(2)]
    driver = Driver(decoder, sequences, block_size=64)
    driver.step([(0, 27), (1, 29)])
    driver.step([(0, 1), (1, 1)])
    driver.step([(0, 2)])
    for ours, tokens in zip(driver.logits, sequences, strict=True):
        torch.testing.assert_close(ours, reference_logits(model, tokens), atol=1e-4, rtol=0)


@interpreted
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("packed", ["_exps.weight", "_up_exps.weight", "_down_exps.weight"])
def test_experts_of_gguf_files_stay_packed(packed: str, tmp_path: Path) -> None:
    """In the bytes of the safetensors checkpoint; files may have other formats among them."""
    shape = CONFIGS["gpt-oss"].to_dict()
    config = GptOssConfig(**shape | {"swiglu_limit": 7.0})  # llama.cpp's constant
    model = make_packed_checkpoint(tmp_path / "checkpoint", config)
    write_gguf(tmp_path / "model.gguf", model, GGMLQuantizationType.MXFP4, among=packed)
    with opened_checkpoint(tmp_path / "model.gguf") as directory:
        decoder = loader.load_model(directory, torch.float32)
    same = loader.load_model(tmp_path / "checkpoint", torch.float32)
    assert (decoder.weight_bytes == same.weight_bytes) == (packed == "_exps.weight")
    tokens = random_tokens(20, 1)
    driver = Driver(decoder, [tokens], block_size=64)
    driver.step([(0, 18)])
    driver.step([(0, 2)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)


@interpreted
@pytest.mark.usefixtures("on_kernels")
@pytest.mark.parametrize("name", ["qwen3 moe", "gpt-oss in MXFP4"])
def test_adapters_of_experts_equal_the_merged_models(name: str, tmp_path: Path) -> None:
    """For rows of two adapters and of none in one step; one adapter leaves the experts alone."""
    folder = tmp_path / "model"
    packs = name not in CONFIGS
    model = make_packed_checkpoint(folder) if packs else make_checkpoint(folder, CONFIGS[name])
    decoder = loader.load_model(folder, torch.float32)
    assert decoder.adapters is not None
    stacks = ["experts.gate_up_proj", "experts.down_proj"]
    of_experts = make_adapter(model, tmp_path / "1", 1, target_parameters=stacks)
    models = [model, of_experts, make_adapter(model, tmp_path / "2", 2)]
    for number in (1, 2):
        decoder.adapters.load(number, PeftAdapter.read(tmp_path / str(number)))
    sequences, adapters = [random_tokens(20, seed) for seed in range(4)], [1, 0, 2, 1]
    driver = Driver(decoder, sequences, block_size=64, adapters=adapters)
    driver.step([(0, 19), (1, 17)])
    driver.step([(0, 1), (1, 3), (2, 20), (3, 20)])
    for ours, tokens, adapter in zip(driver.logits, sequences, adapters, strict=True):
        expected = reference_logits(models[adapter], tokens)
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=0)
