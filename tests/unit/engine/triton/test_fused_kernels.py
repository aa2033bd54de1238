"""Fused kernels equal torch's operators."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from services.engine.model import loader
from services.engine.model.architecture.activation import Activation, Nonlinearity
from services.engine.model.attention.cache_kernel import write_tokens
from services.engine.model.loader import load_model
from services.engine.model.operators import fused_kernels
from services.engine.model.operators.activations import activated
from services.engine.model.operators.rotation import Rotation
from services.engine.model.operators.torch_operators import TorchOperators
from services.engine.model.operators.triton_operators import TritonOperators
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(ours: Tensor, theirs: Tensor) -> None:
    """Require equality to a rounding of the result, and one of what it is computed from."""
    precision = 4e-7 if ours.dtype is torch.float32 else torch.finfo(ours.dtype).eps
    torch.testing.assert_close(ours, theirs, atol=8 * precision, rtol=3 * precision)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 64, 2816])
def test_norm_equals_torchs(dtype: torch.dtype, width: int) -> None:
    rows, weight = torch.randn(3, width).to(dtype), torch.randn(width).to(dtype)
    residual = torch.randn(3, width).to(dtype)
    theirs, ours = TorchOperators(dtype, CPU), TritonOperators(dtype, CPU)
    expected, found = torch.empty_like(rows), torch.empty_like(rows)
    theirs.rms_norm(rows, weight, 1e-5, expected)
    ours.rms_norm(rows, weight, 1e-5, found)
    close(found, expected)
    expected, found = residual.clone(), residual.clone()
    theirs.add_rms_norm(rows, weight, 1e-5, expected)
    ours.add_rms_norm(rows, weight, 1e-5, found)
    close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", ["none", "heads", "all heads"])
@pytest.mark.parametrize("head_dim", [64, 80, 96])
def test_rotation_equals_torchs(dtype: torch.dtype, norms: str, head_dim: int) -> None:
    tokens, queries, keys = 3, 4, 2
    wide = torch.randn(tokens, queries + 2 * keys, head_dim).to(dtype)
    angles = torch.rand(tokens, head_dim // 2) * math.tau
    rotation = Rotation(angles.cos(), angles.sin())
    sizes = {"none": None, "heads": (head_dim, head_dim)}
    size = sizes.get(norms, (queries * head_dim, keys * head_dim))
    weights = [None, None] if size is None else [torch.randn(n).to(dtype) for n in size]
    expected, found = wide.clone(), wide.clone()
    for operators, heads in ((TorchOperators, expected), (TritonOperators, found)):
        rotated = heads[:, : queries + keys]  # its tokens have gaps
        operators(dtype, CPU).rotate(rotated, queries, rotation, weights[0], weights[1], 1e-5)
    close(found, expected)
    assert torch.equal(found[:, queries + keys :], wide[:, queries + keys :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "kind", [kind for kind in Nonlinearity if fused_kernels.has_kernel(Activation(kind))]
)
@pytest.mark.parametrize("gated", [True, False])
def test_activation_equals_torchs(dtype: torch.dtype, kind: Nonlinearity, gated: bool) -> None:
    if kind is Nonlinearity.CLAMPED_SWIGLU and not gated:
        pytest.skip("always gated")
    activation = Activation(kind, gated, alpha=1.702, limit=1.5)
    product = 3 * torch.randn(2, 1300 * (2 if gated else 1))
    out = torch.empty(2, 1300, dtype=dtype)
    fused_kernels.activate(product.to(dtype), activation, out)
    exact = activated(activation, product.to(dtype).float())
    tolerance = 1e-5 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.float(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_dim", [80, 24])
def test_keys_and_values_are_written_to_their_slots_alone(
    dtype: torch.dtype, value_dim: int
) -> None:
    rows = torch.randn(3, 4 * 80 + 2 * 80 + 2 * value_dim).to(dtype)
    keys = rows[:, 4 * 80 : 6 * 80].view(3, 2, 80)
    values = rows[:, 6 * 80 :].view(3, 2, value_dim)
    caches = [torch.zeros(20, 2, width, dtype=dtype) for width in (80, value_dim)]
    slots = torch.tensor([7, 19, 0])
    write_tokens(keys, values, caches[0], caches[1], slots)
    for cache, written in zip(caches, (keys, values), strict=True):
        assert torch.equal(cache[slots], written)
        assert cache.count_nonzero() <= written.numel()


@contextmanager
def fused() -> Iterator[None]:
    """Let the loader choose the operators of a GPU."""
    with patch.object(loader, "choose_operators", lambda *_: TritonOperators(torch.float32, CPU)):
        yield


@pytest.mark.parametrize(
    "name",
    [
        *("llama, biases", "qwen3", "gemma3", "olmo2", "phi3, long", "gpt2", "smollm3", "gpt-oss"),
        *("glm", "cohere, norms", "exaone4", "gpt-neox", "apertus", "hunyuan", "ministral3"),
        *("phimoe", "ernie moe", "glm4 moe", "cohere2 moe", "laguna"),
    ],
)
def test_family_equals_transformers(tmp_path: Path, name: str) -> None:
    model = make_checkpoint(tmp_path, CONFIGS[name])
    with fused(), patch("services.engine.model.attention.native", None):
        decoder = load_model(tmp_path, torch.float32)
    tokens = random_tokens(36, 1)
    driver = Driver(decoder, [tokens], block_size=16)
    driver.step([(0, 34)])
    driver.step([(0, 1)])
    driver.step([(0, 1)])
    expected = reference_logits(model, tokens)
    torch.testing.assert_close(driver.logits[0], expected, atol=1e-4, rtol=0)
