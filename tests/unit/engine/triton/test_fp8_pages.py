"""Pages of keys and values in FP8: rounding, reading back, and whole models over them."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import services.engine.model.loader
from services.engine.model.attention import AttentionStep, KVCache, paged_tiles
from services.engine.model.attention.torch_backend import TorchAttention
from services.engine.model.loader import load_model, load_spec
from services.engine.model.model import Model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint

paged = pytest.importorskip("services.engine.model.attention.paged_backend")
fp8_pages = pytest.importorskip("services.engine.model.attention.fp8_pages")
fp8_rows = pytest.importorskip("tests.unit.engine.triton.fp8_rows")

pytestmark = pytest.mark.skipif(
    "TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled"
)

CPU = torch.device("cpu")
PAGE = 64
TOKENS = 68
CHANGE = 0.15
"""Bound of the mean change of logits by rounded keys and values, as a share of the mean logit"""
ERROR = 0.25
"""Bound of the mean difference from torch over the same rounded keys, as a share of this change: a
key that falls between two numbers may be rounded to either, and change the experts of a token"""


def rows_of(dtype: torch.dtype, width: int) -> Tensor:
    """Return keys of 10 tokens and 3 heads, of magnitudes from 1e-30 to 1e4, and zeros."""
    torch.manual_seed(5)
    rows = torch.randn(10, 3, width) * 10.0 ** torch.randint(-3, 5, (10, 3, 1))
    rows[0, 0] = 0
    rows[1, 1] *= 1e-30
    rows[2, 2, 0] = 448  # the largest of E4M3, and a tie between two numbers beside it
    rows[2, 2, 1] = 17
    return rows.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("head_dim", "value_dim"), [(16, 16), (80, 48)])
def test_tokens_are_rounded_to_their_slots(
    dtype: torch.dtype, head_dim: int, value_dim: int
) -> None:
    """The step's own keys become what later steps read, so that both compute alike."""
    exact = rows_of(dtype, head_dim), rows_of(dtype, value_dim).flip(0)
    together = torch.cat([each.flatten(1) for each in exact], dim=1)
    keys, values = together[:, : 3 * head_dim], together[:, 3 * head_dim :]
    rows = keys.view(10, 3, head_dim), values.view(10, 3, value_dim)
    slots = torch.randperm(3 * PAGE)[:10]
    pages = [
        fp8_pages.numbers_of(fp8_pages.make_pages(3, PAGE, 3, width), PAGE, 3, width)
        for width in (head_dim, value_dim)
    ]
    fp8_pages.write_fp8(*rows, *pages, slots)
    for given, mine, stored in zip(exact, rows, pages, strict=True):
        held = fp8_pages.decoded_pages(stored).flatten(0, 1)
        expected = fp8_rows.rounded(given)
        assert torch.equal(held[slots], expected)
        assert torch.equal(mine.float(), expected.to(dtype).float())
        others = torch.ones(3 * PAGE, dtype=torch.bool)
        others[slots] = False
        assert not held[others].any()
        error, largest = (expected - given.float()).abs(), given.float().abs().amax(2, keepdim=True)
        assert (error <= torch.maximum(given.float().abs() / 16, largest * 2.0**-17)).all()


def test_whole_pages_are_rounded_alike() -> None:
    """The ways of long prompts are measured over such pages."""
    exact = torch.randn(2, 3, 2, 16), torch.randn(2, 3, 2, 8)
    expected = [fp8_pages.decoded_pages(fp8_rows.packed_pages(each)) for each in exact]
    pages = fp8_pages.rounded_pages(*exact)
    assert all(map(torch.equal, map(fp8_pages.decoded_pages, pages), expected))


class RoundedAttention(TorchAttention):
    """Torch's attention in float32, over keys and values that torch has rounded."""

    def write(self, layer: int, step: AttentionStep) -> None:
        for rows in (step.keys, step.values):
            rows.copy_(fp8_rows.rounded(rows))
        super().write(layer, step)


@pytest.fixture
def on_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let models in float32 have caches in FP8, so that nothing else is rounded."""
    monkeypatch.setattr(paged, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(services.engine.model.loader, "native", None)

    def choose(*model: Any, kv_dtype: str, **_: object) -> TorchAttention:
        if kv_dtype == "fp8":
            attention: TorchAttention = paged.PagedAttention(*model, fp8_pages.KV_FP8)
            return attention
        return TorchAttention(*model) if kv_dtype == "model" else RoundedAttention(*model)

    monkeypatch.setattr(services.engine.model.loader, "choose_backend", choose)


@pytest.mark.usefixtures("on_pages")
@pytest.mark.parametrize(
    "name", ["llama", "gemma2", "gpt-oss", "bloom", "gemma3n", "mimo v2 flash", "qwen3.5"]
)
def test_model_over_fp8_pages_equals_one_with_rounded_keys(name: str, tmp_path: Path) -> None:
    """Prompts whole, in chunks and token by token read the same rounded keys, so they agree."""
    make_checkpoint(tmp_path, CONFIGS[name])
    tokens = random_tokens(TOKENS, 3)
    exact = run(load_model(tmp_path, torch.float32), tokens, [TOKENS])
    rounded = run(load_model(tmp_path, torch.float32, kv_dtype="rounded"), tokens, [TOKENS])
    change = (rounded - exact).abs().mean()
    assert 0 < change < CHANGE * exact.abs().mean()
    decoder = load_model(tmp_path, torch.float32, kv_dtype="fp8")
    for chunks in ([TOKENS], [33, 1, 27, *[1] * (TOKENS - 61)]):
        ours = run(decoder, tokens, chunks)
        assert (ours - rounded).abs().mean() < ERROR * change


@pytest.mark.usefixtures("on_pages")
def test_padded_steps_over_fp8_pages_equal_those_of_their_own_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The padding is written to the spare block, also in FP8."""
    monkeypatch.setattr(paged_tiles, "_MOST_PROGRAMS", 256)
    make_checkpoint(tmp_path, CONFIGS["llama"])
    tokens = random_tokens(TOKENS, 3)
    decoder = load_model(tmp_path, torch.float32, kv_dtype="fp8")
    chunks = [63, 1, 3, 1]
    padded, plain = (run(decoder, tokens, chunks, padded=each) for each in (True, False))
    torch.testing.assert_close(padded, plain, atol=1e-3, rtol=0)


def run(decoder: Model, tokens: Tensor, chunks: list[int], *, padded: bool = False) -> Tensor:
    driver = Driver(decoder, [tokens], block_size=PAGE, padded=padded)
    for chunk in chunks:
        driver.step([(0, chunk)])
    return driver.logits[0]


@pytest.fixture
def cache(tmp_path: Path) -> tuple[KVCache, int]:
    """Return a cache of 5 blocks, and the bytes that its sizing counts for them."""
    make_checkpoint(tmp_path, CONFIGS["mimo v2 flash"])
    spec = load_spec(tmp_path)
    backend = paged.PagedAttention(spec, torch.bfloat16, CPU, fp8_pages.KV_FP8)
    counted = sum(map(backend.token_bytes, spec.paged_layers.values()))
    return backend.allocate(5, PAGE), 5 * PAGE * counted


def test_memory_of_fp8_pages_is_counted_with_their_exponents(cache: tuple[KVCache, int]) -> None:
    """Keys and values as wide as each other, and not."""
    held, counted = cache
    assert sum(pages.nbytes for pages in held.pages) == counted


def test_copied_block_takes_its_exponents_along(cache: tuple[KVCache, int]) -> None:
    held, _ = cache
    for pages in held.pages:
        pages.random_(0, 256)
    copied = [pages[1].clone() for pages in held.pages]
    held.copy_blocks([(group, 1, 4) for group in range(max(1, len(held.groups)))])
    assert all(torch.equal(pages[4], each) for pages, each in zip(held.pages, copied, strict=True))
