"""The images, which all tests of this folder share."""

import os
import shutil
import subprocess

import pytest

from tests.container.engine import ALL_SERVICES, docker
from tests.manifests import ROOT


@pytest.fixture(scope="session")
def compose_program() -> tuple[str, ...]:
    return ("docker-compose",) if shutil.which("docker-compose") else ("docker", "compose")


@pytest.fixture(scope="session")
def images(compose_program: tuple[str, ...]) -> None:
    """Build the images of the services, and the one of all services."""
    build(*compose_program, "build")
    names = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "TORCH_INDEX_URL")
    given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    arguments = [part for each in given for part in ("--build-arg", each)]
    file = ("-f", "deploy/docker/Dockerfile")
    docker("build", "-q", "-t", ALL_SERVICES, *file, *arguments, ".", folder=ROOT)


@pytest.fixture(scope="session")
def gpu_image(compose_program: tuple[str, ...]) -> None:
    """Build the image of the engine for GPUs."""
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.gpu.yml")
    build(*compose_program, *files, "build", "engine")


def build(*command: str) -> None:
    built = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-5000:] + built.stderr[-5000:]
