"""Memory that a model takes when it is loaded."""

from pathlib import Path

from services.engine.execution.loaded_model import load
from services.engine.settings import EngineSettings
from tests.unit.engine.checkpoints import Driver, random_tokens


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
