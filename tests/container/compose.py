"""Tests of docker-compose.yml on a machine with only Docker. tests/container/run starts them."""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.container.engine import SERVICES, START_SECONDS, docker
from tests.manifests import ROOT
from tests.stack import free_ports
from tokenwire.client import Client, EngineClient

METRICS_PORTS = {
    "grammar": 51053,
    "engine": 51052,
    "tokenizer": 51051,
    "jobs": 51054,
    "http_shim": 8000,
}

pytestmark = pytest.mark.timeout(3600)  # The first test builds the images, torch included.


@dataclass(frozen=True, slots=True)
class Compose:
    """The running project."""

    url: str
    tokenizer: str
    engine: str
    command: tuple[str, ...]
    environment: dict[str, str]

    def run(self, *arguments: str) -> str:
        """Run docker-compose with the arguments. Return its output."""
        result = subprocess.run(
            [*self.command, *arguments],
            cwd=ROOT,
            env=os.environ | self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stdout[-5000:] + result.stderr[-5000:]
        return result.stdout.strip()

    def container(self, service: str) -> str:
        return self.run("ps", "-q", service)

    def metrics(self, container: str, port: int) -> str:
        """Return the metrics of a container, read within the project's network."""
        networks = "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}"
        address = docker("inspect", "-f", networks, container)
        get = f"urllib.request.urlopen('http://{address}:{port}/metrics').read().decode()"
        return self.run(
            "exec", "-T", "grammar", "python", "-c", f"import urllib.request; print({get})"
        )

    def answered(self, container: str) -> bool:
        """Return whether a tokenizer service has answered a completion."""
        metrics = self.metrics(container, METRICS_PORTS["tokenizer"])
        ok = re.findall(
            r'^tokenwire_tokenizer_requests_total\{.*outcome="ok".*\} (.+)$', metrics, re.M
        )
        return any(map(float, ok))

    def health(self, service: str) -> str:
        return docker("inspect", "-f", "{{.State.Health.Status}}", self.container(service))


@pytest.fixture(scope="module")
def compose(compose_program: tuple[str, ...], images: None) -> Iterator[Compose]:
    http, tokenizer, engine = free_ports(3)
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.ports.yml")
    project = Compose(
        url=f"http://127.0.0.1:{http}",
        tokenizer=f"127.0.0.1:{tokenizer}",
        engine=f"127.0.0.1:{engine}",
        command=(*compose_program, *files),
        environment={
            "COMPOSE_PROJECT_NAME": f"tokenwire-test-{os.getpid()}",
            "PORT": str(http),
            "TOKENIZER_PORT": str(tokenizer),
            "ENGINE_PORT": str(engine),
            "ENGINE_ARGS": "--kv-memory 256MiB",
        },
    )
    try:
        project.run("up", "-d")
        deadline = time.monotonic() + START_SECONDS
        while (states := {name: project.health(name) for name in SERVICES}) != dict.fromkeys(
            SERVICES, "healthy"
        ):
            assert time.monotonic() < deadline, f"{states}\n{project.run('logs', '--tail', '50')}"
            time.sleep(1)
        yield project
    finally:
        project.run("down", "--volumes")


def test_http_returns_a_completion_of_the_requested_length(compose: Compose) -> None:
    body = {"prompt": "def add(a, b):", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{compose.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        completion = json.load(answer)
    assert completion["choices"][0]["text"]
    assert completion["usage"]["completion_tokens"] == 8


def test_metrics_of_every_container_are_served_at_its_address(compose: Compose) -> None:
    """Prometheus asks for them by address, because a name has several containers."""
    for service, port in METRICS_PORTS.items():
        metrics = compose.metrics(compose.container(service), port)
        assert 'tokenwire_build_info{kernels="' in metrics
        assert f'service="{service}"' in metrics


def test_compose_takes_the_file_for_prometheus_and_grafana(compose: Compose) -> None:
    program = compose.command[: compose.command.index("-f")]
    files = ("-f", "docker-compose.yml", "-f", "docker-compose.observability.yml")
    result = subprocess.run(
        [*program, *files, "config", "--services"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert {*SERVICES, "prometheus", "grafana"} == set(result.stdout.split()), result.stderr


def test_text_and_tokens_over_grpc_give_the_same_completion(compose: Compose) -> None:
    async def ask() -> tuple[str, str]:
        async with Client(compose.tokenizer) as client, EngineClient(compose.engine) as engine:
            text = (await client.generate("def add(a, b):", max_tokens=8, temperature=0)).text
            ids = (await client.encode("def add(a, b):")).ids
            generation = await engine.generate(ids, max_tokens=8, temperature=0)
            return text, await client.decode(generation.token_ids)

    of_text, of_ids = asyncio.run(ask())
    assert of_text
    assert of_ids == of_text


def test_output_follows_a_grammar(compose: Compose) -> None:
    body = {"prompt": "x", "max_tokens": 8, "grammar": {"type": "regex", "value": "[0-9]{3}"}}
    request = urllib.request.Request(
        f"{compose.url}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert json.load(answer)["choices"][0]["text"].isdecimal()


@pytest.mark.parametrize("service", SERVICES)
def test_services_do_not_run_as_root(compose: Compose, service: str) -> None:
    assert docker("exec", compose.container(service), "id", "-u") != "0"


@pytest.mark.parametrize("service", SERVICES)
def test_services_write_nowhere_but_to_tmp(compose: Compose, service: str) -> None:
    write = "touch /tmp/x && ! touch /srv/x 2>/dev/null && ! touch /var/tmp/x 2>/dev/null"
    docker("exec", compose.container(service), "sh", "-c", write)


def test_health_of_an_engine_with_a_bad_model_is_the_reason(
    compose: Compose, tmp_path: Path
) -> None:
    """`docker inspect` shows the output of health checks, so the operator finds the reason."""
    image = docker("inspect", "-f", "{{.Image}}", compose.container("engine"))
    environment = ("-e", "TOKENWIRE_ENGINE_HOLD_ON_ERROR=600", "-e", "ENGINE_ARGS=")
    (tmp_path / "model").mkdir()
    mount = ("-v", f"{tmp_path / 'model'}:/model:ro")
    entry = ("--entrypoint", "python")
    module = ("-m", "tokenwire.services.engine", "--port", "50052", "--model", "/model")
    container = docker("run", "-d", *environment, *mount, *entry, image, *module)
    try:
        check = ["docker", "exec", container, "tokenwire", "health", "127.0.0.1:50052"]
        deadline = time.monotonic() + START_SECONDS
        while True:
            answer = subprocess.run(check, capture_output=True, text=True, check=False)
            assert answer.returncode == 1
            if "config.json" in answer.stdout + answer.stderr:
                return
            assert time.monotonic() < deadline, answer
            time.sleep(1)
    finally:
        docker("rm", "-f", container)


def test_engine_image_has_compiled_kernels_and_no_compiler(compose: Compose) -> None:
    engine = compose.container("engine")
    find = "from tokenwire.services.engine.kernels.build import LIBRARY; print(LIBRARY.exists())"
    assert docker("exec", engine, "python", "-c", find) == "True"
    assert not docker("exec", engine, "sh", "-c", "command -v g++ || true")


def test_ports_of_all_but_the_grammar_service_are_published_on_loopback(compose: Compose) -> None:
    """The services need no keys, so other machines must not reach them."""
    for service in SERVICES:
        published = docker("port", compose.container(service)).splitlines()
        assert all(" -> 127.0.0.1:" in line for line in published)
        assert bool(published) == (service != "grammar")


def test_killed_engine_is_started_again(compose: Compose) -> None:
    container = compose.container("engine")
    pid = docker("inspect", "-f", "{{.State.Pid}}", container)
    os.kill(int(pid), signal.SIGKILL)
    deadline = time.monotonic() + START_SECONDS
    while True:
        state = docker(
            "inspect", "-f", "{{.State.Pid}} {{.State.Health.Status}}", container
        ).split()
        if state[0] not in ("0", pid) and state[1] == "healthy":
            return
        assert time.monotonic() < deadline, state
        time.sleep(1)


def test_engines_and_tokenizer_services_are_scaled(compose: Compose) -> None:
    """They find each other by DNS, and the requests reach all of them."""
    first = int(compose.tokenizer.rpartition(":")[2])
    many = Compose(
        url=compose.url,
        tokenizer=compose.tokenizer,
        engine=compose.engine,
        command=(*compose.command[:-4], "-f", "docker-compose.yml"),
        environment=compose.environment | {"TOKENIZER_PORT": f"{first}-{first + 9}"},
    )
    many.run("up", "-d", "--no-build", "--scale", "engine=3", "--scale", "tokenizer=2")
    containers = {name: many.container(name).split() for name in ("engine", "tokenizer")}
    assert {name: len(each) for name, each in containers.items()} == {"engine": 3, "tokenizer": 2}
    deadline = time.monotonic() + START_SECONDS
    for container in [*containers["engine"], *containers["tokenizer"]]:
        while docker("inspect", "-f", "{{.State.Health.Status}}", container) != "healthy":
            assert time.monotonic() < deadline, docker("logs", "--tail", "20", container)
            time.sleep(1)
    while not completes(compose.url) or states(compose.url) != ["serving"] * 3:
        assert time.monotonic() < deadline, states(compose.url)
        time.sleep(1)
    while not all(map(compose.answered, containers["tokenizer"])):
        assert time.monotonic() < deadline, "a tokenizer service gets no request"
        assert completes(compose.url)


def states(url: str) -> list[str]:
    """Return the states of the engines that the tokenizer service has found."""
    with urllib.request.urlopen(f"{url}/status.json", timeout=60) as answer:
        [model] = json.load(answer)["models"]
    return [engine["state"] for engine in model["engines"] or ()]


def completes(url: str) -> bool:
    """Return whether the server completes a prompt now. Raises HTTPError unless it is 503."""
    body = {"prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return bool(json.load(answer)["usage"]["completion_tokens"])
    except urllib.error.HTTPError as error:
        if error.code == 503:
            return False
        raise


def test_services_exit_with_code_0_when_stopped(compose: Compose) -> None:
    """This test must be the last one, because it stops the services."""
    containers = [each for name in SERVICES for each in compose.container(name).split()]
    compose.run("stop")
    for container in containers:
        assert docker("inspect", "-f", "{{.State.ExitCode}}", container) == "0"
