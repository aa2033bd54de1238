"""Models that clients of Ollama's API download from a hub, use, and remove."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from ollama import Client, ResponseError

from services.common.accounts.key_file import add_key
from tests.stack import Stack, free_ports
from tests.unit.common.model_files.hub_server import Hub, running_hub

HELLO = [{"role": "user", "content": "Hello!"}]
OPTIONS = {"num_predict": 4}


@pytest.fixture(scope="module")
def hub(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    for name in ("small", "other"):
        shutil.copytree(embedded_model, folder / name)
    with running_hub(Hub({f"owner/{name}": folder / name for name in ("small", "other")})) as hub:
        yield hub


@contextmanager
def served(hub: Hub, tmp_path: Path, *flags: str) -> Iterator[str]:
    """Serve the hub's cache, which is empty; yield the URL."""
    with running(hub, tmp_path, *flags) as (url, _):
        yield url


@contextmanager
def running(hub: Hub, tmp_path: Path, *flags: str) -> "Iterator[tuple[str, subprocess.Popen[str]]]":
    """As `served`; yield the process, too."""
    http, tokenizer, jobs, manager = map(str, free_ports(4))
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "HF_ENDPOINT": hub.url}
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tokenwire", "serve", "--ollama", "--models", "--port", http,
            "--tokenizer-port", tokenizer, "--jobs-port", jobs, "--manager-port", manager,
            "--log-dir", str(tmp_path / "logs"), "--no-spare", "--dtype", "float32", *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | inherited(),
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("Tokenwire serves"), process.communicate()
    try:
        yield f"http://127.0.0.1:{http}", process
    finally:
        process.send_signal(signal.SIGTERM)
        _, complaints = process.communicate(timeout=120)
    assert process.returncode == 0, complaints


def inherited() -> dict[str, str]:
    """Return the variables by which Python finds the code under test."""
    return {name: os.environ[name] for name in os.environ if name.startswith("PYTHON")}


def test_model_is_pulled_used_and_deleted(hub: Hub, tmp_path: Path) -> None:
    with served(hub, tmp_path) as url:
        client = Client(host=url)
        assert client.list().models == []
        with pytest.raises(ResponseError, match="model 'owner/small' not found"):
            client.chat("owner/small", HELLO)
        steps = list(client.pull("hf.co/owner/small", stream=True))
        assert steps[0].status == "pulling manifest"
        assert steps[-1].status == "success"
        counted = [step for step in steps if step.total]
        assert counted
        assert all(0 < (step.completed or 0) <= (step.total or 0) for step in counted)
        assert {step.digest for step in counted} == {counted[0].digest}
        assert [each.model for each in client.list().models] == ["owner/small:latest"]
        for name in ("owner/small", "hf.co/owner/small:latest"):
            assert client.chat(name, HELLO, options=OPTIONS).eval_count == 4
        assert client.pull("owner/other").status == "success"
        assert len(client.list().models) == 2
        client.delete("owner/other")
        assert [each.model for each in client.list().models] == ["owner/small:latest"]
        client.delete("owner/small")
        assert client.ps().models == []
        with pytest.raises(ResponseError, match="not found") as caught:
            client.delete("owner/small")
        assert caught.value.status_code == 404
        for name in ("owner/absent", "nothing", "/etc", "--to=/tmp"):
            with pytest.raises(ResponseError) as caught:
                client.pull(name)
            assert caught.value.status_code == 400
            assert caught.value.error


def test_a_pull_is_ended_with_a_reason_by_the_stop_of_the_server(hub: Hub, tmp_path: Path) -> None:
    """The user can repeat it, and it goes on where it was; the stop waits for no download."""
    with (
        ThreadPoolExecutor() as threads,
        running(hub, tmp_path, "--log-level", "warning") as (url, server),
    ):
        hub.waits.clear()
        hub.may_send.clear()
        try:
            pull = threads.submit(Client(host=url).pull, "owner/small")
            assert hub.waits.wait(60)
            log = tmp_path / "logs" / "http_shim.log"
            before = log.read_text()
            server.send_signal(signal.SIGTERM)
            with pytest.raises(ResponseError, match="The server is stopping") as caught:
                pull.result(60)
            assert caught.value.status_code == 503
            assert server.wait(timeout=120) == 0
        finally:
            hub.may_send.set()
        assert log.read_text() == before


def test_only_operators_pull_and_delete(hub: Hub, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    secret = add_key(keys, "default")
    with served(hub, tmp_path, "--keys", str(keys)) as url:
        client = Client(host=url, headers={"Authorization": f"Bearer {secret}"})
        with pytest.raises(ResponseError) as caught:
            client.pull("owner/small")
        assert caught.value.status_code == 403
        with pytest.raises(ResponseError) as caught:
            client.delete("owner/small")
        assert caught.value.status_code == 403


def test_server_of_one_model_downloads_none(stack: Stack) -> None:
    client = Client(host=stack.url)
    with pytest.raises(ResponseError, match="--models") as caught:
        client.pull("owner/small")
    assert caught.value.status_code == 501
    with pytest.raises(ResponseError, match="on demand") as caught:
        client.generate(stack.model_id, keep_alive=0)
    assert caught.value.status_code == 400
