"""The context and the KV blocks that fit into free memory."""

import pytest

from services.common.settings import StartupError
from services.engine.execution.cache_need import CacheNeed, GroupNeed
from services.engine.execution.memory_budget import (
    choose_num_blocks,
    context_in_force,
    wanted_context,
)

GIB, MIB = 1 << 30, 1 << 20
BLOCK = 4 * MIB
NEED = CacheNeed(131_072, 32, [GroupNeed(BLOCK)], max_running=256)
"""One context of this model takes 16 GiB"""


def context(free: int, kv_memory: str = "auto", context_length: str = "auto") -> int:
    blocks = choose_num_blocks(kv_memory, context_length, NEED, "cpu", free)
    return context_in_force(context_length, NEED, blocks)


def test_long_context_is_cut_to_what_fits() -> None:
    """A model whose context is longer than the memory must still start."""
    assert choose_num_blocks("auto", "auto", NEED, "cpu", 24 * GIB) == 12 * GIB // BLOCK
    assert context(24 * GIB) == 12 * GIB // BLOCK * 32
    assert context(64 * GIB) == 131_072
    assert context(64 * GIB, kv_memory="4GiB") == 1024 * 32
    assert context(24 * GIB, kv_memory="25%") == 6 * GIB // BLOCK * 32


def test_mapped_weights_leave_most_memory_to_the_page_cache() -> None:
    mapped = choose_num_blocks("auto", "auto", NEED, "cpu", 24 * GIB, has_mapped_weights=True)
    assert mapped == 3 * GIB // BLOCK
    stated = choose_num_blocks("50%", "auto", NEED, "cpu", 24 * GIB, has_mapped_weights=True)
    assert stated == 12 * GIB // BLOCK


def test_memory_of_a_gpu_is_taken_almost_whole() -> None:
    blocks = choose_num_blocks("auto", "auto", NEED, "cuda", 10 * GIB)
    assert blocks == int(0.97 * 10 * GIB) // BLOCK


def test_cache_holds_no_more_than_all_running_sequences_need() -> None:
    few = CacheNeed(64, 32, [GroupNeed(BLOCK)], max_running=3)
    assert choose_num_blocks("auto", "auto", few, "cpu", 640 * GIB) == 6
    assert choose_num_blocks("4GiB", "auto", few, "cpu", 640 * GIB) == 6
    assert choose_num_blocks("auto", "32", few, "cpu", 640 * GIB) == 3


@pytest.mark.parametrize("context_length", ["max", "131072"])
def test_fixed_context_takes_more_than_half_or_is_refused_with_what_is_missing(
    context_length: str,
) -> None:
    assert context(20 * GIB, context_length=context_length) == 131_072
    assert context(20 * GIB, "25%", context_length) == 131_072
    with pytest.raises(StartupError, match=r"takes 16\.0 GiB; 6\.5 GiB of memory are"):
        context(10 * GIB, context_length=context_length)
    with pytest.raises(StartupError, match=r"16\.0 GiB of KV cache, more than --kv-memory 4GiB"):
        context(64 * GIB, "4GiB", context_length)


def test_shorter_context_needs_less_memory() -> None:
    assert context(2 * GIB, context_length="8192") == 8192
    assert wanted_context("8192", 131_072) == 8192
    with pytest.raises(StartupError, match="more than the 131072 tokens of the checkpoint"):
        context(64 * GIB, context_length="131073")


def test_context_of_a_few_tokens_is_not_served_by_surprise() -> None:
    with pytest.raises(StartupError, match=r"512 tokens takes 64\.0 MiB; 28\.0 MiB of memory are"):
        context(100 * MIB)
    assert context(GIB, kv_memory="4MiB") == 32  # as asked
