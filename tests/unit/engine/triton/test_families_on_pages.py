"""Models on the CUDA backend equal those of transformers, in Triton's interpreter."""

import os
from pathlib import Path

import pytest
import torch

import services.engine.model.loader
from services.engine.model.attention import AttentionBackend
from services.engine.model.loader import load_model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint, reference_logits

paged = pytest.importorskip("services.engine.model.attention.paged_backend")
xformers = pytest.importorskip("services.engine.model.attention.xformers_backend")

TOKENS = 75


@pytest.mark.skipif("TRITON_INTERPRET" not in os.environ, reason="a GPU runs the kernels compiled")
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("llama", paged.PagedAttention),
        ("llama", xformers.XformersAttention),
        ("gemma2", paged.PagedAttention),
        ("gpt-oss", paged.PagedAttention),
        ("bloom", paged.PagedAttention),
        ("mpt", xformers.XformersAttention),
        ("gemma4, experts", paged.PagedAttention),
        ("mimo v2 flash", paged.PagedAttention),
        ("mimo v2 flash", xformers.XformersAttention),
        ("laguna", paged.PagedAttention),
    ],
)
def test_logits_equal_those_of_transformers(
    name: str,
    kind: type[AttentionBackend],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole prompts, chunks behind a prefix, a shared block, mixed steps and decodes.

    In float32, which the backend leaves to torch on a GPU, errors are not hidden by rounding.
    """
    monkeypatch.setattr(paged, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(services.engine.model.loader, "native", None)
    on_pages = lambda *model, **_: kind(*model)  # noqa: E731
    monkeypatch.setattr(services.engine.model.loader, "choose_backend", on_pages)
    model = make_checkpoint(tmp_path, CONFIGS[name])
    decoder = load_model(tmp_path, torch.float32)
    sequences = [random_tokens(TOKENS, seed) for seed in range(3)]
    sequences.append(torch.cat((sequences[0][:64], sequences[1][64:])))
    driver = Driver(decoder, sequences, block_size=64)
    driver.step([(0, TOKENS)])
    driver.share(3, 0, 64)
    driver.step([(1, 40), (2, 1)])
    for _ in range(2):
        driver.step([(2, 1), (1, 7), (3, 4)])
    for _ in range(3):
        driver.step([(1, 1), (2, 1), (3, 1)])
    driver.step([(1, 18), (2, TOKENS - 6)])
    for tokens, ours in zip(sequences, driver.logits, strict=True):
        theirs = reference_logits(model, tokens)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
