"""Tests of each image by itself, and of the one that serves with all services."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from services.common.accounts.key_file import add_key
from tests.container.engine import (
    ALL_SERVICES,
    BASE,
    IMAGES,
    PROJECT,
    VERSION,
    docker,
    until_healthy,
)
from tests.stack import free_ports

LIMITS = {"engine": 800, "tokenwire": 850}
"""Most megabytes that an image with torch adds to its base"""
LIMIT = 250
"""Most megabytes that another image adds"""
TOGETHER = 950
"""Most megabytes that all images add together, each layer counted once"""
MODEL = "/models/tokenwire-code-6m"

pytestmark = [pytest.mark.timeout(3600), pytest.mark.usefixtures("images")]


def inspected(image: str) -> Any:
    [document] = json.loads(docker("image", "inspect", image))
    return document


def megabytes(image: str) -> float:
    return float(inspected(image)["Size"] - inspected(BASE)["Size"]) / 1e6


@contextmanager
def running(*arguments: str) -> Iterator[str]:
    """Start a container, and yield its id once it is healthy."""
    container = docker("run", "-d", *arguments)
    try:
        until_healthy(container)
        yield container
    finally:
        docker("rm", "-f", "-v", container)


def completion(url: str, key: str = "") -> int:
    """Return the number of tokens of a completion. Raises HTTPError."""
    body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    if key:
        headers["authorization"] = f"Bearer {key}"
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


@pytest.mark.parametrize("image", IMAGES)
def test_labels_say_what_an_image_is(image: str) -> None:
    labels = inspected(image)["Config"]["Labels"]
    assert labels["org.opencontainers.image.version"] == VERSION
    assert labels["org.opencontainers.image.licenses"] == PROJECT["license"]
    assert labels["org.opencontainers.image.title"].startswith("Tokenwire")


@pytest.mark.parametrize("image", IMAGES)
def test_image_has_an_unprivileged_user_and_a_health_check(image: str) -> None:
    configuration = inspected(image)["Config"]
    assert configuration["User"] == "10001"
    assert configuration["Healthcheck"]["Test"][1:3] == ["tokenwire", "health"]


@pytest.mark.parametrize("image", IMAGES)
def test_list_of_packages_is_that_of_the_image(image: str) -> None:
    program = (
        "import importlib.metadata as m, json; document = json.load(open("
        "'/usr/share/sbom/tokenwire.cdx.json')); print(json.dumps([[[c['name'], c['version']] "
        "for c in [document['metadata']['component'], *document['components']]], "
        "[[d.metadata['Name'], d.version] for d in m.distributions(path=m.sys.path)]]))"
    )
    listed, installed = json.loads(
        docker("run", "--rm", "--entrypoint", "python", image, "-c", program)
    )
    assert sorted(listed) == sorted(installed)


@pytest.mark.parametrize("image", IMAGES)
def test_image_for_cpus_has_no_compiler(image: str) -> None:
    command = ("--entrypoint", "sh", image, "-c", "command -v gcc cc || echo none")
    assert docker("run", "--rm", *command) == "none"


@pytest.mark.parametrize("image", IMAGES)
def test_image_is_small(image: str) -> None:
    name = image.partition(":")[0].rpartition("/")[2]
    assert megabytes(image) < LIMITS.get(name, LIMIT)


def layers(image: str) -> dict[str, int]:
    """Return the sizes in bytes of an image's layers, by the steps that led to them."""
    form = "{{.CreatedAt}} {{.CreatedBy}}\t{{.Size}}"
    rows = docker("history", "--no-trunc", "--human=false", "--format", form, image).splitlines()
    sizes: dict[str, int] = {}
    steps = ""
    for step, _, size in (row.rpartition("\t") for row in reversed(rows)):
        steps += step
        sizes[steps] = int(size)
    return sizes


def test_images_share_their_layers() -> None:
    """A machine that pulls them all pulls torch once."""
    together: dict[str, int] = {}
    for image in IMAGES:
        together |= layers(image)
    assert (sum(together.values()) - inspected(BASE)["Size"]) / 1e6 < TOGETHER


def test_container_without_arguments_serves_the_embedded_model() -> None:
    """It does so with a read-only file system and without capabilities, too."""
    [port] = free_ports(1)
    confined = ("--read-only", "--tmpfs", "/tmp", "-v", "/data", "--cap-drop", "ALL")
    published = ("-p", f"127.0.0.1:{port}:8000")
    with running(*confined, *published, ALL_SERVICES) as container:
        assert completion(f"http://127.0.0.1:{port}") == 8
        docker("stop", "-t", "60", container)
        assert docker("inspect", "-f", "{{.State.ExitCode}}", container) == "0"


def test_container_serves_a_model_of_the_host_to_those_with_a_key(tmp_path: Path) -> None:
    [port] = free_ports(1)
    tmp_path.chmod(0o755)
    key = add_key(tmp_path / "keys.json", name="alice")
    (tmp_path / "keys.json").chmod(0o644)
    model = Path(__file__).resolve().parents[2] / "models" / "tokenwire-code-6m"
    mounts = ("-v", f"{tmp_path}:/keys:ro", "-v", f"{model}:/served:ro")
    published = ("-p", f"127.0.0.1:{port}:8000")
    command = ("serve", "--model", "/served", "--model-id", "mine", "--keys", "/keys/keys.json")
    url = f"http://127.0.0.1:{port}"
    with running(*mounts, *published, ALL_SERVICES, *command):
        with pytest.raises(urllib.error.HTTPError) as refused:
            completion(url)
        assert refused.value.code == 401
        assert completion(url, key) == 8


def test_container_runs_any_command_of_tokenwire() -> None:
    assert VERSION in docker("run", "--rm", ALL_SERVICES, "--version")
