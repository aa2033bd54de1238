"""Docker, and the images that the tests start."""

import subprocess
import time
import tomllib
from pathlib import Path

from tests.manifests import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION: str = PROJECT["version"]
SERVICES = ("grammar", "engine", "tokenizer", "jobs", "http_shim")
ALL_SERVICES = f"tokenwire:{VERSION}"
IMAGES = (*(f"tokenwire/{name}:{VERSION}" for name in SERVICES), ALL_SERVICES)
BASE = "python:3.11-slim-bookworm"
START_SECONDS = 300
STATE = "{{.State.Status}} {{.State.Health.Status}}"


def docker(*arguments: str, folder: Path | None = None) -> str:
    """Run docker. Return its output; what it says of an error is the message of the failure."""
    ended = subprocess.run(
        ["docker", *arguments], check=False, capture_output=True, text=True, cwd=folder
    )
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
    return ended.stdout.strip()


def logs(container: str) -> str:
    """Return the last lines that a container has written, to either stream."""
    command = ["docker", "logs", "--tail", "30", container]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    return ended.stdout + ended.stderr


def until_healthy(container: str) -> None:
    """Return when the health check of a container succeeds."""
    deadline = time.monotonic() + START_SECONDS
    while (state := docker("inspect", "-f", STATE, container)) != "running healthy":
        log = logs(container)
        assert state.startswith("running"), f"{state}: {log}"
        assert time.monotonic() < deadline, f"{state}: {log}"
        time.sleep(1)
