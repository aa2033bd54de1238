"""Steps in padded pieces compute what whole steps compute."""

from pathlib import Path

import pytest
import torch

from services.engine.batch.buckets import TOKEN_BUCKETS, token_bucket
from services.engine.model.loader import load_model
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint

TOKENS = 90


@pytest.mark.parametrize("family", CONFIGS)
def test_padded_pieces_equal_whole_steps(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS[family])
    decoder = load_model(tmp_path, torch.float32)
    sequences = [random_tokens(TOKENS, seed) for seed in range(4)]
    whole, pieces = (
        Driver(decoder, sequences, block_size=16, in_pieces=in_pieces)
        for in_pieces in (False, True)
    )
    for driver in (whole, pieces):
        driver.step([(0, 64), (1, 3)])  # padded
        driver.step([(0, 1), (1, 20), (2, 43)])  # fills its bucket
        driver.step([(0, 1), (1, 1), (2, 7), (3, 50)], kept=[1, 1, 1, 30])
        driver.step([(3, 1)])
    for ours, theirs in zip(pieces.logits, whole.logits, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5, equal_nan=True)


def test_padding_writes_to_the_spare_block_alone(tmp_path: Path) -> None:
    """Otherwise a step would overwrite keys and values of streams that are not part of it."""
    make_checkpoint(tmp_path, CONFIGS["llama"])
    decoder = load_model(tmp_path, torch.float32)
    driver = Driver(decoder, [random_tokens(TOKENS, seed) for seed in range(2)], in_pieces=True)
    driver.step([(0, 80)])
    before = [layer.clone() for layer in driver.cache.pages]
    driver.step([(1, 5)])
    after = driver.cache.pages
    written = driver.blocks_of(1)
    for old, new in zip(before, after, strict=True):
        changed = (old != new).flatten(1).any(dim=1).nonzero().flatten().tolist()
        assert set(changed) - {driver.cache.num_blocks - 1} <= written


def test_bucket_is_the_least_size_that_holds_the_tokens() -> None:
    for tokens in range(1, TOKEN_BUCKETS[-1] + 1):
        size = token_bucket(tokens)
        assert size >= tokens
        assert not any(tokens <= other < size for other in TOKEN_BUCKETS)
