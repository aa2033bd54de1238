"""Services that can't start and tell health checks why."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from services.common.network.health import why_not_serving
from tests.stack import free_ports


def has_loop(service: int) -> bool:
    """Return whether an engine's loop process runs, which holds the memory of torch."""
    children = Path(f"/proc/{service}/task/{service}/children").read_text().split()
    commands = [Path(f"/proc/{pid}/cmdline").read_text() for pid in children]
    return any("spawn_main" in command for command in commands)


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("engine", {"model_type": "nix", "architectures": ["Nix"]}, "the architecture Nix"),
        ("grammar", None, "does not exist"),
    ],
)
async def test_failed_start_reaches_the_health_check(
    name: str, config: dict[str, object] | None, reason: str, tmp_path: Path
) -> None:
    """A container's health log is where an operator looks for the reason."""
    model = tmp_path / "model"
    if config is not None:
        model.mkdir()
        (model / "config.json").write_text(json.dumps(config))
    [port] = free_ports(1)
    service = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"services.{name}", "--port", str(port)),
        *("--model", str(model), "--hold-on-error", "3600"),
        stderr=asyncio.subprocess.PIPE,
    )
    target = f"127.0.0.1:{port}"
    try:
        while reason not in (await why_not_serving(target) or ""):
            assert service.returncode is None
            await asyncio.sleep(0.1)
        command = (sys.executable, "-m", "tokenwire", "health", target)
        probe = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
        _, said = await probe.communicate()
        assert probe.returncode == 1
        assert said.decode().startswith(f"tokenwire: {target} is not serving: ")
        assert reason in said.decode()
        while has_loop(service.pid):  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.1)
    finally:
        service.terminate()
        _, log = await service.communicate()
    assert service.returncode == 2
    assert reason in log.decode()
