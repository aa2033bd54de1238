"""What a model needs is taken when it is loaded."""

from pathlib import Path

from services.engine.execution.loaded_model import load
from services.engine.settings import EngineSettings
from tests.unit.engine.checkpoints import Driver, random_tokens


def test_the_largest_step_writes_into_memory_that_was_taken_at_the_start(
    embedded_model: Path,
) -> None:
    """A machine without it would refuse to start, rather than fail when a long prompt comes."""
    settings = EngineSettings(
        model=embedded_model, kv_memory="16MiB", max_step_tokens=96, max_running=4
    )
    decoder = load(settings).decoder
    taken = decoder.buffers
    driver = Driver(decoder, [random_tokens(97, seed) for seed in range(5)])
    driver.step([(index, 1) for index in range(4)])
    driver.step([*((index, 1) for index in range(4)), (4, 96)])
    assert decoder.buffers is taken
