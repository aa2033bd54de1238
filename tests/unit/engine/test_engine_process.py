"""The gRPC side learns that the loop died, and the log says of what."""

import asyncio
from pathlib import Path

import pytest

from services.engine.engine_process import EngineProcess
from services.engine.messages import SetMasks
from services.engine.settings import EngineSettings


async def test_a_step_that_fails_ends_the_process_and_leaves_its_reason_in_the_log(
    embedded_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    settings = EngineSettings(model=embedded_model, dtype="float32", kv_memory="16MiB")
    process = EngineProcess(settings, on_output=lambda _: None, on_death=died.set_result)
    await process.start()
    process.send(SetMasks(masks=None))  # type: ignore[arg-type]
    assert "exit code 1" in await died
    assert "a step failed" in capfd.readouterr().err
    await process.stop()
