"""Weights in floating point as they are stored: exact products, models in the file's memory."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu
from transformers import PreTrainedModel

from services.engine.kernels.library import InstructionSet
from services.engine.model.architecture.activation import SWIGLU
from services.engine.model.decoder import Decoder
from services.engine.model.loader import load_model
from services.engine.model.operators import torch_operators
from services.engine.model.operators.deltas import Delta
from services.engine.model.operators.grouped_operators import GroupedOperators
from services.engine.model.operators.interface import ExpertWeights
from services.engine.model.operators.native_mixture import NativeMixture
from services.engine.model.operators.torch_operators import TorchOperators
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits
from tests.unit.engine.machines import restrict_kernels

SETS = (InstructionSet.BASELINE, InstructionSet.AVX2, InstructionSet.AVX512)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIXTEEN_BITS = DTYPES[1:]
ALL_HALVES = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)


@pytest.fixture(params=SETS, ids=lambda each: each.name)
def operators(request: pytest.FixtureRequest) -> Iterator[GroupedOperators]:
    with restrict_kernels(request.param) as kernels:
        yield GroupedOperators(kernels, torch.float32)
        kernels.use_pool(0)


def assert_near(ours: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> None:
    """Compare with the product in float64, to the rounding of float32 sums of its terms."""
    rows, weight = rows.double(), weight.double()
    bound = rows.abs() @ weight.abs().T + 1
    assert ((ours - (rows @ weight.T + bias)).abs() <= 2e-6 * bound).all()


@pytest.mark.parametrize("instructions", SETS, ids=lambda each: each.name)
@given(
    outputs=st.integers(1, 130),
    inputs=st.integers(1, 700),
    rows=st.integers(1, 420),
    gap=st.integers(0, 5),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**16),
)
def test_products_equal_those_in_float64(
    instructions: InstructionSet,
    outputs: int,
    inputs: int,
    rows: int,
    gap: int,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    stored = torch.randn(outputs, inputs + gap, generator=generator).to(dtype)
    weight = stored[:, gap:].clone()
    x, bias = torch.randn(rows, inputs, generator=generator), torch.randn(outputs)
    whole = torch.full((rows + 1, outputs + 3), 7.0)
    out = whole[:rows, :outputs]
    with restrict_kernels(instructions) as kernels:
        projection = GroupedOperators(kernels, torch.float32).projection(stored[:, gap:], bias)
        stored.zero_()  # the product has a copy
        projection.into(x, out)
        assert_near(out, x, weight, bias)
        projection.add_to(x, out)
        assert_near(out / 2, x, weight, bias)
        alone = torch.empty(1, outputs)
        projection.into(x[-1:], alone)
        projection.into(x, out)
        assert torch.equal(alone[0], out[-1])  # whatever rows are beside it
        projection.into(x[:0], out[:0])
        assert (whole[rows] == 7).all()  # nothing is written past the end
        assert (whole[:, outputs:] == 7).all()
        half = torch.empty(rows, outputs, dtype=torch.bfloat16)
        projection.into(x.bfloat16(), half)
        theirs = x.bfloat16().double() @ weight.double().T + bias
        torch.testing.assert_close(half.double(), theirs, atol=2e-2, rtol=1e-2)
        kernels.use_pool(0)


def test_every_stored_number_is_widened_exactly(operators: GroupedOperators) -> None:
    """Subnormal numbers too: models with small weights would lose them."""
    for numbers in (ALL_HALVES, ALL_HALVES.view(torch.bfloat16)):
        out = torch.empty(1, len(numbers))
        operators.projection(numbers[:, None], None).into(torch.ones(1, 1), out)
        torch.testing.assert_close(out[0], numbers.float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_broken_row_gives_no_numbers_and_leaves_others_alone(
    operators: GroupedOperators, broken: float
) -> None:
    """Such a row ends its request; a number in its place would be taken for an answer."""
    projection = operators.projection(torch.randn(40, 64).bfloat16(), None)
    x = torch.randn(9, 64)
    clean, out = torch.empty(2, 9, 40)
    projection.into(x, clean)
    x[4, 5] = broken
    projection.into(x, out)
    assert not out[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(out[others], clean[others])


def test_transposed_weights_are_multiplied(operators: GroupedOperators) -> None:
    """GPT-2 stores them so."""
    weight = torch.randn(50, 41).bfloat16()
    x, out = torch.randn(3, 50), torch.empty(3, 41)
    operators.projection(weight.T, None).into(x, out)
    assert_near(out, x, weight.T)


class _Shift(Delta):
    """Adds 1 to every output."""

    is_active = True

    def add_to(self, rows: Tensor, out: Tensor) -> None:
        out += 1


def test_adapter_of_a_gate_changes_what_is_activated(operators: GroupedOperators) -> None:
    gate, up = torch.randn(2, 48, 64).half() / 8
    made, delta = operators.gate(gate, up, None, None), _Shift()
    made.adapt(delta)
    x, out = torch.randn(5, 64), torch.empty(5, 48)
    first, second = x @ gate.float().T, x @ up.float().T
    made.into(x, out)
    torch.testing.assert_close(out, silu(first + 1) * (second + 1), atol=1e-4, rtol=1e-4)
    delta.is_active = False
    made.into(x, out)
    torch.testing.assert_close(out, silu(first) * second, atol=1e-4, rtol=1e-4)


def random_expert(width: int, hidden: int, dtype: torch.dtype) -> ExpertWeights:
    gate, up, down = (torch.randn(width, hidden).to(dtype) / 8 for _ in range(3))
    biases = torch.randn(width), torch.randn(width), torch.randn(hidden)
    return ExpertWeights(gate, up, down.T, *biases)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_kernel_mixes_experts_as_torch_does(
    operators: GroupedOperators, dtype: torch.dtype, rows: int
) -> None:
    """Of experts that no row has, and of some that all rows have, too."""
    experts, width, hidden, per_row = 5, 96, 72, 2
    torch.manual_seed(rows)
    stored = [random_expert(width, hidden, dtype) for _ in range(experts)]
    x = torch.randn(rows, hidden)
    chosen = torch.stack([1 + torch.randperm(experts - 1)[:per_row] for _ in range(rows)])
    chosen[:, 0] = 4
    chosen[:, 1] = chosen[:, 1] % 4
    factors = torch.rand(rows, per_row)
    ours, theirs = torch.ones(2, rows, hidden)
    mixture = operators.mixture(stored, experts, per_row, SWIGLU)
    assert isinstance(mixture, NativeMixture)
    mixture.add_to(x, chosen, factors, ours)
    exact = TorchOperators(torch.float32, torch.device("cpu"))
    exact.mixture(stored, experts, per_row, SWIGLU).add_to(x, chosen, factors, theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    alone = torch.ones(1, hidden)
    mixture.add_to(x[-1:], chosen[-1:], factors[-1:], alone)
    assert torch.equal(alone[0], ours[-1])


def make_rounded_checkpoint(directory: Path, family: str, dtype: torch.dtype) -> PreTrainedModel:
    """Save a checkpoint in `dtype`; return the reference, which has the same numbers in float32."""
    model = make_checkpoint(directory, CONFIGS[family])
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    file = directory / "model.safetensors"
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    config = json.loads((directory / "config.json").read_text())
    config["dtype"] = str(dtype).removeprefix("torch.")
    (directory / "config.json").write_text(json.dumps(config))
    return model


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
@pytest.mark.parametrize("instructions", SETS[1:], ids=lambda each: each.name)
@pytest.mark.parametrize("family", ["llama", "qwen3, tied", "gemma3", "qwen3 moe"])
def test_checkpoint_of_16_bits_computes_in_float32_what_transformers_does(
    family: str, instructions: InstructionSet, dtype: torch.dtype, tmp_path: Path
) -> None:
    reference = make_rounded_checkpoint(tmp_path, family, dtype)
    tokens = random_tokens(40, 1)
    with restrict_kernels(instructions) as kernels:
        decoder = load_model(tmp_path, torch.float32)
        driver = Driver(decoder, [tokens])
        for count in (30, 1, 1, 8):
            driver.step([(0, count)])
        kernels.use_pool(0)
    theirs = reference_logits(reference, tokens)
    torch.testing.assert_close(driver.logits[0], theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", SIXTEEN_BITS, ids=str)
def test_model_takes_the_memory_of_its_file(tmp_path: Path, dtype: torch.dtype) -> None:
    """A machine that has room for the file serves it."""
    make_rounded_checkpoint(tmp_path, "qwen3, tied", dtype)
    with restrict_kernels(InstructionSet.AVX2) as kernels:
        decoder = load_model(tmp_path, torch.float32)
        kernels.use_pool(0)
    tensors = load_file(tmp_path / "model.safetensors").values()
    norms = sum(tensor.numel() for tensor in tensors if tensor.ndim == 1)
    numbers = sum(tensor.numel() for tensor in tensors)
    assert decoder.weight_bytes == 2 * (numbers - norms) + 4 * norms


def test_weights_in_float32_are_rounded_to_the_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--dtype bfloat16 halves such a model's memory, as the check of the start counts it."""
    make_checkpoint(tmp_path, CONFIGS["llama"])
    # this machine's oneDNN would multiply bfloat16 itself
    monkeypatch.setattr(torch_operators, "_has_onednn_kernels", lambda dtype: False)
    with restrict_kernels(InstructionSet.AVX2) as kernels:
        decoder = load_model(tmp_path, torch.bfloat16)
        kernels.use_pool(0)
    tensors = load_file(tmp_path / "model.safetensors")
    read = (tensor for name, tensor in tensors.items() if "embed_tokens" not in name)
    assert decoder.weight_bytes == 2 * sum(tensor.numel() for tensor in read)


@pytest.mark.parametrize("family", ["llama", "qwen3, tied", "gemma3"])
def test_replayed_decodes_compute_what_single_kernels_do(family: str, tmp_path: Path) -> None:
    make_rounded_checkpoint(tmp_path, family, torch.bfloat16)
    logits = []
    with restrict_kernels(InstructionSet.AVX2) as kernels:
        for replays in (True, False):
            decoder = load_model(tmp_path, torch.float32)
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
        kernels.use_pool(0)
    assert torch.equal(*logits)
