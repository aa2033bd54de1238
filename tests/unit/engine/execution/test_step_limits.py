"""Limits of steps that follow from a GPU, and those of a CPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from services.engine.execution.loaded_model import load
from services.engine.execution.step_limits import CPU_LIMITS, Card, StepLimits, limits_of_card
from services.engine.loop.loaded_loop import load_loop
from services.engine.settings import EngineSettings

GIB = 1 << 30
LLAMA_8B = Card(
    free_bytes=0,
    multiprocessors=0,
    sequence_bytes=512 * 131_072,
    step_bytes=94_000,
    row_bytes=5 * 4 * 128_256,
)


@pytest.mark.parametrize(
    ("name", "gib", "multiprocessors", "expected"),
    [
        ("H200", 123, 132, StepLimits(1024, 8192)),
        ("A100 with 80 GB", 63, 108, StepLimits(768, 8192)),
        ("L40S", 28, 142, StepLimits(384, 8192)),
        ("L4", 6, 58, StepLimits(256, 4096)),
    ],
)
def test_limits_follow_from_memory_and_multiprocessors(
    name: str, gib: int, multiprocessors: int, expected: StepLimits
) -> None:
    card = replace(LLAMA_8B, free_bytes=gib * GIB, multiprocessors=multiprocessors)
    assert limits_of_card(card) == expected


def test_large_states_leave_room_for_fewer_sequences() -> None:
    """More sequences than the memory has slots of states would wait for each other."""
    card = replace(LLAMA_8B, free_bytes=123 * GIB, multiprocessors=132)
    states = replace(card, sequence_bytes=card.sequence_bytes + 2 * 64 * 2**20)
    assert limits_of_card(states) == StepLimits(512, 8192)


def test_card_without_free_memory_keeps_the_least_limits() -> None:
    card = replace(LLAMA_8B, free_bytes=0, multiprocessors=132)
    assert limits_of_card(card) == CPU_LIMITS


def test_limits_of_a_cpu_are_those_in_force(embedded_model: Path) -> None:
    settings = EngineSettings(model=embedded_model, kv_memory="4MiB", device="cpu")
    description = load_loop(settings).description
    assert (description.max_running, description.max_step_tokens) == (256, 4096)


def test_stated_limits_stay(embedded_model: Path) -> None:
    settings = EngineSettings(
        model=embedded_model, kv_memory="4MiB", device="cpu", max_running=3, max_step_tokens=70
    )
    found = load(settings).settings
    assert (found.max_running, found.max_step_tokens) == (3, 70)
    one = replace(settings, max_step_tokens=0)
    assert load(one).settings.max_step_tokens == 4096
