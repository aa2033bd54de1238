"""Memory that a model takes when it is loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.settings import StartupError
from services.engine.execution.loaded_model import load
from services.engine.loop.loaded_loop import load_loop
from services.engine.messages import RequestDone
from services.engine.settings import EngineSettings
from tests.unit.engine.checkpoints.configs import CONFIGS
from tests.unit.engine.checkpoints.driver import Driver, random_tokens
from tests.unit.engine.checkpoints.files import make_checkpoint
from tests.unit.engine.tiny import make_checkpoint as make_tiny
from tests.unit.engine.tiny import make_request


def test_largest_step_uses_memory_reserved_at_start(embedded_model: Path) -> None:
    """A machine with too little memory refuses to start, instead of failing at a long prompt."""
    settings = EngineSettings(
        model=embedded_model, kv_memory="16MiB", max_step_tokens=96, max_running=4
    )
    decoder = load(settings).decoder
    reserved = decoder.buffers
    driver = Driver(decoder, [random_tokens(97, seed) for seed in range(5)])
    driver.step([(index, 1) for index in range(4)])
    driver.step([*((index, 1) for index in range(4)), (4, 96)])
    assert decoder.buffers is reserved


def test_model_without_attention_has_its_whole_context_for_the_memory_of_states(
    tmp_path: Path,
) -> None:
    """Nothing is kept of single tokens: memory bounds the number of sequences, not their length."""
    make_checkpoint(tmp_path, CONFIGS["mamba2"])
    settings = EngineSettings(
        model=tmp_path, dtype="float32", kv_memory="1MiB", max_step_tokens=96, max_running=4
    )
    loaded = load_loop(settings)
    assert loaded.description.context_length == 1 << 20
    assert 0 < loaded.description.kv_bytes <= 1 << 20
    prompt, cached = random_tokens(200, 1).tolist(), []
    for handle in range(2):
        loaded.steps.apply([make_request(handle, [prompt], max_tokens=5, context=4096)])
        while not loaded.steps.is_idle:
            outputs = loaded.steps.step(lambda: ()).outputs
            cached += [each.cached_tokens for each in outputs if isinstance(each, RequestDone)]
    assert cached == [0, 192]  # whole blocks


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"max_running": 2_000_000_000}, "iB of memory are missing"),
        ({"max_step_tokens": 2_000_000_000}, "iB of memory are missing"),
        ({"kv_memory": "1"}, "less than one block"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_limit_beyond_the_memory_ends_the_start_with_its_reason(
    tmp_path: Path, wrong: dict[str, Any], complaint: str
) -> None:
    """The kernel would kill the engine later, in the middle of requests."""
    settings = EngineSettings(model=make_tiny(tmp_path), dtype="float32", device="cpu")
    with pytest.raises(StartupError, match=complaint):
        load_loop(replace(settings, **wrong))
