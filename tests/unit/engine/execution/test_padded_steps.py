"""Padded steps with chunks compute what the steps alone compute."""

from pathlib import Path

import pytest
import torch

from services.engine.model.loader import load_model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint

TOKENS = 90


@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "llama4", "gpt-oss", "gemma4, experts", "bloom"]
)
def test_padded_steps_equal_whole_steps(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    decoder = load_model(tmp_path, torch.float32)
    sequences = [random_tokens(TOKENS, seed) for seed in range(4)]
    whole, padded = (
        Driver(decoder, sequences, block_size=32, padded=padded) for padded in (False, True)
    )
    for driver in (whole, padded):
        driver.step([(0, 64), (1, 3)])
        driver.step([(0, 1), (1, 20), (2, 43)])
        driver.step([(0, 1), (1, 1), (2, 7), (3, 50)], kept=[1, 1, 1, 30])
        driver.step([(3, 1)])
    for ours, theirs in zip(padded.logits, whole.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_padding_writes_to_the_spare_block_alone(tmp_path: Path) -> None:
    """Otherwise a step would overwrite keys and values of streams that are not part of it."""
    make_checkpoint(tmp_path, CONFIGS["llama"])
    decoder = load_model(tmp_path, torch.float32)
    driver = Driver(decoder, [random_tokens(TOKENS, seed) for seed in range(2)], padded=True)
    driver.step([(0, 80)])
    before = [layer.clone() for layer in driver.cache.pages]
    driver.step([(1, 5)])
    after = driver.cache.pages
    written = driver.blocks_of(1)
    for old, new in zip(before, after, strict=True):
        changed = (old != new).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) - {driver.cache.num_blocks - 1} <= written
