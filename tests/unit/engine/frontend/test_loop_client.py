"""The gRPC process notices the death of the loop process, and the log has the reason."""

import asyncio
import multiprocessing
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from services.engine.framing import pack
from services.engine.frontend.loop_client import LoopClient, spawn_loop
from services.engine.loop.loop_process import run
from services.engine.messages import SetMasks
from services.engine.settings import EngineSettings


async def test_failed_step_ends_the_process_and_logs_the_reason(
    embedded_model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    settings = EngineSettings(model=embedded_model, dtype="float32", kv_memory="16MiB")
    client = LoopClient(settings, spawn_loop(), on_output=lambda _: None, on_death=died.set_result)
    await client.start()
    client.send(SetMasks(masks=None))  # type: ignore[arg-type]
    assert "exit code 1" in await died
    assert "a step failed" in capfd.readouterr().err
    await client.stop()


@pytest.mark.parametrize("loads", [True, False])
def test_loop_whose_grpc_process_is_gone_prints_nothing(
    embedded_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], loads: bool
) -> None:
    """If another service fails first, its message must be the last one on the terminal."""
    ours, theirs = socket.socketpair()
    model = embedded_model if loads else tmp_path
    settings = EngineSettings(model=model, dtype="float32", kv_memory="16MiB", log_level="warning")
    ours.sendall(pack(settings))
    ours.close()
    process = multiprocessing.get_context("spawn").Process(target=run, args=(theirs,))
    process.start()
    process.join()
    assert capfd.readouterr().err == ""


def test_engine_without_a_descriptor_for_its_loop_says_so(embedded_model: Path) -> None:
    command = ["sh", "-c", 'ulimit -n 8; exec "$@"', "sh", sys.executable, "-m", "services.engine"]
    ended = subprocess.run(
        [*command, "--model", str(embedded_model)], capture_output=True, text=True, check=False
    )
    reason = "The process tokenwire-engine-loop can't be started: Too many open files."
    assert (ended.returncode, ended.stderr) == (2, f"engine: {reason}\n")


def test_loop_that_gets_no_settings_ends_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    """It starts before the flags' model is checked: a refused start would leave it behind."""
    loop = spawn_loop()
    loop.link.close()
    loop.process.join()
    assert loop.process.exitcode == 0
    assert capfd.readouterr().err == ""
