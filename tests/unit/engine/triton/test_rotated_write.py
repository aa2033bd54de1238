"""The kernel that rotates and writes equals the kernels that do one after the other."""

import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from services.engine.model import loader
from services.engine.model.attention import fp8_pages, paged_backend
from services.engine.model.attention.cache_kernel import write_tokens
from services.engine.model.loader import load_model
from services.engine.model.operators.rotated_write import write_rotated
from services.engine.model.operators.rotation import Rotation, UnrotatedHeads
from services.engine.model.operators.triton_operators import TritonOperators
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
QUERIES, KEYS, TOKENS, PAGE = 6, 3, 4, 64
SLOTS = torch.tensor([70, 3, 191, 64])


def pages_of(dtype: torch.dtype, width: int) -> Tensor:
    if dtype == fp8_pages.KV_FP8:
        pages: Tensor = fp8_pages.numbers_of(
            fp8_pages.make_pages(3, PAGE, KEYS, width), PAGE, KEYS, width
        )
        return pages
    return torch.zeros(3, PAGE, KEYS, width, dtype=dtype)


def held(pages: Tensor) -> Tensor:
    return fp8_pages.decoded_pages(pages) if pages.dtype == fp8_pages.KV_FP8 else pages


@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(64, 64), (80, 24)])
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, fp8_pages.KV_FP8),
        (torch.float16, fp8_pages.KV_FP8),
    ],
    ids=str,
)
def test_heads_and_cache_equal_those_of_two_kernels(
    dtype: torch.dtype, kept: torch.dtype, head_dim: int, value_dim: int, has_norms: bool
) -> None:
    """Programs rotate heads of queries and keys together, as 9 is no multiple of their heads."""
    torch.manual_seed(3)
    widths = ((QUERIES + KEYS) * head_dim, KEYS * value_dim)
    exact = (3 * torch.randn(TOKENS, 16 + sum(widths))).to(dtype)
    angles = torch.rand(TOKENS, head_dim // 2) * math.tau
    angles[:, head_dim // 4 :] = 0  # a partial rotation
    rotation = Rotation(angles.cos(), angles.sin())
    norms = [torch.randn(head_dim).to(dtype) if has_norms else None for _ in range(2)]
    results = []
    for is_fused in (True, False):
        qkv = exact.clone()
        heads, values = qkv[:, 16:].split_with_sizes(widths, dim=1)
        rotated = heads.view(TOKENS, QUERIES + KEYS, head_dim)
        values = values.view(TOKENS, KEYS, value_dim)
        pages = pages_of(kept, head_dim), pages_of(kept, value_dim)
        if is_fused:
            unrotated = UnrotatedHeads(rotated, values, rotation, norms[0], norms[1], 1e-5)
            write_rotated(unrotated, *pages, SLOTS)
        else:
            operators = TritonOperators(dtype, CPU)
            operators.rotate(rotated, QUERIES, rotation, norms[0], norms[1], 1e-5)
            keys = rotated[:, QUERIES:]
            if kept == fp8_pages.KV_FP8:
                fp8_pages.write_fp8(keys, values, *pages, SLOTS)
            else:
                slots_of_keys, slots_of_values = (each.flatten(0, 1) for each in pages)
                write_tokens(keys, values, slots_of_keys, slots_of_values, SLOTS)
        results.append((qkv, *map(held, pages)))
    assert not torch.equal(results[0][0], exact)
    for fused, separate in zip(*results, strict=True):
        assert torch.equal(fused, separate)


@pytest.mark.parametrize("name", ["qwen3", "ministral3", "gemma3n"])
def test_family_equals_transformers(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms of heads; factors on queries; norms of values, and layers without keys of their own."""
    own = TritonOperators(torch.float32, CPU)
    monkeypatch.setattr(paged_backend, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(loader, "native", None)
    monkeypatch.setattr(
        loader, "choose_backend", lambda *model, **_: paged_backend.PagedAttention(*model)
    )
    monkeypatch.setattr(loader, "choose_operators", lambda *_: own)
    model = make_checkpoint(tmp_path, CONFIGS[name])
    tokens = random_tokens(40, 1)
    driver = Driver(load_model(tmp_path, torch.float32), [tokens], block_size=PAGE)
    for chunk in (30, 9, 1):
        driver.step([(0, chunk)])
    torch.testing.assert_close(driver.logits[0], reference_logits(model, tokens), atol=1e-4, rtol=0)
