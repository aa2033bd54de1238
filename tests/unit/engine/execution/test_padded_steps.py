"""Padded steps with chunks compute what the steps alone compute."""

from pathlib import Path

import pytest
import torch

from services.engine.batch.buckets import MixedSize
from services.engine.execution.batch_builder import BatchBuilder
from services.engine.execution.step_graphs import key_of
from services.engine.model.loader import load_model
from services.engine.scheduling.step_plan import StepPlan
from tests.unit.engine import tiny
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint

TOKENS = 90
NOTHING = StepPlan([], [], 0, 0)


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


def test_steps_with_and_without_chunks_have_graphs_of_their_own(tmp_path: Path) -> None:
    """The graph of one would compute other attention for a step of the other of the same shape."""
    decoder = tiny.load_tiny(tmp_path)
    builder = BatchBuilder(decoder, decoder.allocate_cache(80), pads=True)
    builder.reserve(16, 16, 64)
    decodes = builder.build(NOTHING, padding=16, least_blocks=64)
    mixed = builder.build(NOTHING, size=MixedSize(tokens=16, sequences=16, width=64))
    assert decodes.token_ids.data_ptr() == mixed.token_ids.data_ptr()
    assert decodes.block_tables.shape == mixed.block_tables.shape
    assert key_of(decodes) != key_of(mixed)
    assert key_of(mixed) == key_of(
        builder.build(NOTHING, size=MixedSize(tokens=16, sequences=16, width=64))
    )
