"""Models on demand: `tokenwire serve --models`, as clients and operators see it."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest
import pytest_asyncio

from tests.documented_metrics import documented_metrics, exposed_metrics
from tests.stack import free_ports

pytestmark = pytest.mark.asyncio(loop_scope="session")


@dataclass(frozen=True, slots=True)
class Server:
    """A server of two copies of the embedded model, and of a damaged one; one is loaded at most."""

    url: str
    process: "subprocess.Popen[str]"
    folder: Path
    metrics_url: str
    """Address of the manager's metrics"""

    def child(self, service: str) -> int:
        """Return the process id of a service."""
        pid = self.process.pid
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            if f"services.{service}" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
        raise AssertionError(f"{service} does not run")

    def told(self) -> str:
        """Return the next line that the supervisor writes."""
        assert self.process.stderr is not None
        return self.process.stderr.readline().strip()


@contextmanager
def _served(folder: Path, logs: Path, *flags: str) -> Iterator[Server]:
    http, tokenizer, jobs, manager = map(str, free_ports(4))
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tokenwire", "serve", "--models", str(folder), "--port", http,
            "--tokenizer-port", tokenizer, "--jobs-port", jobs, "--manager-port", manager,
            "--log-dir", str(logs), "--max-loaded", "1", "--dtype", "float32",
            "--kv-memory", "64MiB", "--ollama", *flags,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("Tokenwire serves"), process.communicate()
    try:
        metrics_url = f"http://127.0.0.1:{int(manager) + 1000}"
        yield Server(f"http://127.0.0.1:{http}", process, folder, metrics_url)
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 0


@pytest.fixture(scope="module")
def server(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("models")
    for name in ("first", "second", "damaged"):
        shutil.copytree(embedded_model, folder / name)
    os.truncate(folder / "damaged" / "tokenizer.json", 1000)
    with _served(folder, tmp_path_factory.mktemp("logs")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def http(server: Server) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        yield client


def _body(model: str, **fields: object) -> dict[str, object]:
    return {"model": model, "prompt": "def ", "max_tokens": 4, "temperature": 0} | fields


async def _status(http: httpx.AsyncClient, model: str) -> dict[str, Any]:
    status: dict[str, Any] = (await http.get(f"/v1/models/{model}")).json()["status"]
    return status


async def _until(http: httpx.AsyncClient, model: str, value: str) -> dict[str, Any]:
    """Return the status of a model once it has a value; nothing tells HTTP clients of it."""
    async with asyncio.timeout(60):
        while (status := await _status(http, model))["value"] != value:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    return status


async def test_two_models_push_each_other_out(server: Server, http: httpx.AsyncClient) -> None:
    """A user of many models needs the memory of one."""
    ready = await http.get("/ready")
    assert ready.status_code == 200, "a server without a loaded model takes requests"
    for name, other in (("first", "second"), ("second", "first"), ("first", "second")):
        answer = await http.post("/v1/completions", json=_body(name))
        assert (answer.status_code, answer.json()["model"]) == (200, name)
        status = await _status(http, name)
        assert status["value"] == "loaded"
        assert status["memory_bytes"] > 2**28
        assert (await _status(http, other))["value"] == "idle"
    cards = (await http.get("/v1/models")).json()["data"]
    assert [card["id"] for card in cards] == ["damaged", "first", "second"]
    assert cards[2]["max_model_len"], "an idle model is described as when it was loaded"
    statuses = (await http.get("/status.json")).json()["models"]
    assert {each["id"]: each["reachable"] for each in statuses}["first"]


async def test_the_manager_exposes_its_documented_metrics(server: Server) -> None:
    documented = {name for name in documented_metrics() if name.startswith("tokenwire_model")}
    exposed = exposed_metrics(server.metrics_url)
    assert {name for name in exposed if name.startswith("tokenwire_model")} == documented
    assert documented


async def test_a_stream_that_waits_for_a_load_begins_and_tells_its_progress(
    server: Server, http: httpx.AsyncClient
) -> None:
    """A proxy would end a request that is silent for the time of a load."""
    await _unloaded(http, "first", "second")
    server.process.send_signal(signal.SIGSTOP)  # so that the load takes until the first line
    try:
        async with http.stream(
            "POST", "/v1/chat/completions", json=_chat("first", stream=True)
        ) as answer:
            waiting = answer.aiter_lines()
            assert (await anext(waiting)).startswith(": loading")
            server.process.send_signal(signal.SIGCONT)
            lines = [line async for line in waiting]
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert answer.status_code == 200
    assert lines[-2:] == ["data: [DONE]", ""]


async def test_a_model_that_is_used_is_waited_for_in_turn(http: httpx.AsyncClient) -> None:
    """A running answer is never cut; those who wait for the memory are not overtaken."""
    await http.post("/v1/completions", json=_body("first"))
    long = _body("first", max_tokens=600, ignore_eos=True, stream=True)
    async with http.stream("POST", "/v1/completions", json=long) as running:
        lines = running.aiter_lines()
        await anext(lines)
        waiting = asyncio.create_task(http.post("/v1/completions", json=_body("second")))
        await _until(http, "second", "idle")
        rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]"
    answer = await waiting
    assert (answer.status_code, answer.json()["model"]) == (200, "second")


async def test_keep_alive_of_a_request_ends_its_model(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json=_body("second", keep_alive=0))
    assert answer.status_code == 200
    await _until(http, "second", "idle")


async def test_a_load_that_fails_is_one_sentence_for_all_who_wait(
    http: httpx.AsyncClient,
) -> None:
    answers = await asyncio.gather(
        *(http.post("/v1/completions", json=_body("damaged")) for _ in range(3))
    )
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "load_failed"
        assert "tokenizer" in answer.json()["error"]["message"]
        assert int(answer.headers["retry-after"]) > 1
    status = await _status(http, "damaged")
    assert status["value"] == "failed"
    assert status["error"]


async def test_a_failed_load_shows_clients_no_folder(
    http: httpx.AsyncClient, server: Server
) -> None:
    """Any key may ask for a model and read its status; the log has the path."""
    answer = await http.post("/v1/completions", json=_body("damaged"))
    statuses = await http.get("/status.json")
    assert answer.json()["error"]["code"] == "load_failed"
    assert "damaged/tokenizer.json" in answer.json()["error"]["message"]
    assert str(server.folder) not in answer.text + statuses.text


async def test_an_operator_loads_and_unloads(http: httpx.AsyncClient) -> None:
    await _unloaded(http, "first", "second")
    loaded = await http.post("/v1/models/load", json={"model": "first", "keep_alive": "1h"})
    assert loaded.status_code == 200
    assert loaded.json()["status"]["value"] == "loaded"
    assert loaded.json()["status"]["idle_until"] is not None
    long = _body("first", max_tokens=1900, ignore_eos=True, stream=True)
    async with http.stream("POST", "/v1/completions", json=long) as running:
        lines = running.aiter_lines()
        await anext(lines)
        refused = await http.post("/v1/models/unload", json={"model": "first"})
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "model_in_use"
        forced = await http.post("/v1/models/unload", json={"model": "first", "force": True})
        assert forced.json()["status"]["value"] == "idle"
        rest = [line async for line in lines if line]
    assert "An operator has unloaded the model first" in rest[-1]
    unknown = await http.post("/v1/models/load", json={"model": "frist"})
    assert unknown.status_code == 404
    assert "Similar names: first." in unknown.json()["error"]["message"]
    wrong = await http.post("/v1/models/load", json={"model": "first", "keep_alive": "soon"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "keep_alive")


async def test_a_model_that_comes_into_the_folder_is_served(
    server: Server, http: httpx.AsyncClient
) -> None:
    """A download must not need a restart."""
    shutil.copytree(server.folder / "first", server.folder / "third")
    async with asyncio.timeout(60):  # scans are seconds apart
        body = _body("third")
        while (await http.post("/v1/completions", json=body)).status_code == 404:  # noqa: ASYNC110
            await asyncio.sleep(0.5)
    assert (await _status(http, "third"))["value"] == "loaded"


async def test_a_batch_loads_its_models(http: httpx.AsyncClient) -> None:
    await _unloaded(http, "first", "second", "third")
    lines = [
        json.dumps({"custom_id": name, "method": "POST", "url": "/v1/completions",
                    "body": _body(name)})
        for name in ("first", "second")
    ]  # fmt: skip
    content = "\n".join(lines).encode()
    file = await http.post(
        "/v1/files", data={"purpose": "batch"}, files={"file": ("batch.jsonl", content)}
    )
    batch = await http.post(
        "/v1/batches",
        json={
            "input_file_id": file.json()["id"],
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
    )
    path = f"/v1/batches/{batch.json()['id']}"
    async with asyncio.timeout(120):
        while (state := (await http.get(path)).json())["status"] != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert state["request_counts"] == {"total": 2, "completed": 2, "failed": 0}


async def test_a_shim_that_is_killed_releases_its_models(
    server: Server, http: httpx.AsyncClient
) -> None:
    """Else its model would stay in memory for ever."""
    await http.post("/v1/models/load", json={"model": "second"})
    long = _body("second", max_tokens=1900, ignore_eos=True, stream=True)
    async with http.stream("POST", "/v1/completions", json=long) as running:
        await anext(running.aiter_bytes())
        os.kill(server.child("http_shim"), signal.SIGKILL)
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as other:
        answer = await other.post("/v1/completions", json=_body("first"))
        assert answer.status_code == 200


async def test_a_catalog_is_reloaded_while_a_killed_service_starts_again(
    server: Server, http: httpx.AsyncClient
) -> None:
    """A service that starts is no reason to end the others."""
    killed = server.child("jobs")
    os.kill(killed, signal.SIGKILL)
    async with asyncio.timeout(60):
        while _child(server, "jobs") in (None, killed):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(0.02)
        server.process.send_signal(signal.SIGHUP)
        while (await http.get("/v1/files")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert server.process.poll() is None
    assert (await http.post("/v1/completions", json=_body("first"))).status_code == 200


def _child(server: Server, service: str) -> int | None:
    try:
        return server.child(service)
    except (AssertionError, FileNotFoundError):
        return None


async def _unloaded(http: httpx.AsyncClient, *models: str) -> None:
    for model in models:
        await http.post("/v1/models/unload", json={"model": model, "force": True})


def _chat(model: str, **fields: object) -> dict[str, object]:
    messages = [{"role": "user", "content": "Hello"}]
    return {"model": model, "messages": messages, "max_tokens": 4} | fields


async def test_ollamas_client_loads_lists_and_unloads_models(
    server: Server, http: httpx.AsyncClient
) -> None:
    """As Open WebUI and `ollama stop` do."""
    client = ollama.AsyncClient(host=server.url)
    await _unloaded(http, "first", "second")
    assert (await client.ps()).models == []
    listed = {each.model for each in (await client.list()).models}
    assert {"first:latest", "second:latest"} <= listed
    loaded = await client.generate("first", keep_alive="1h")
    assert loaded.done_reason == "load"
    assert (loaded.load_duration or 0) > 0
    [running] = (await client.ps()).models
    assert (running.model, (running.size or 0) > 2**28) == ("first:latest", True)
    assert running.expires_at is not None
    left = running.expires_at.timestamp() - time.time()
    assert 3000 < left <= 3601
    hello = [{"role": "user", "content": "Hello!"}]
    options = {"num_predict": 4}
    answer = await client.chat("second", hello, options=options, keep_alive=-1)
    assert 0 < (answer.load_duration or 0) < (answer.total_duration or 0)
    [running] = (await client.ps()).models
    assert running.model == "second:latest"
    assert running.expires_at is not None
    assert running.expires_at.year > 2100
    assert "tools" in ((await client.show("first")).capabilities or ())
    assert (await client.generate("second", keep_alive=0)).done_reason == "unload"
    assert (await client.ps()).models == []
    parts = [part async for part in await client.chat("first", hello, options=options, stream=True)]
    assert parts[-1].done
    assert (parts[-1].load_duration or 0) > 0
    raw = await client.generate("first", "def ", raw=True, options={"num_ctx": 40})
    assert (raw.eval_count or 0) > 16


async def test_a_normal_stop_ends_requests_and_writes_no_warning(
    embedded_model: Path, tmp_path: Path
) -> None:
    """Errors in the log of each stop would teach operators to overlook them."""
    for name in ("first", "second"):
        shutil.copytree(embedded_model, tmp_path / "models" / name)
    logs = tmp_path / "logs"
    flags = ("--log-level", "warning", "--no-spare")
    with _served(tmp_path / "models", logs, *flags) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            assert (await http.post("/v1/models/load", json={"model": "first"})).is_success
            long = _body("first", max_tokens=1900, ignore_eos=True, stream=True)
            async with http.stream("POST", "/v1/completions", json=long) as running:
                lines = running.aiter_lines()
                await anext(lines)
                waiting = asyncio.ensure_future(http.post("/v1/completions", json=_body("second")))
                async with asyncio.timeout(60):
                    while not await _waits(server):  # noqa: ASYNC110 - only metrics tell of it
                        await asyncio.sleep(0.05)
                before = _logged(logs)
                server.process.send_signal(signal.SIGTERM)
                refused = await waiting
                rest = [line async for line in lines if line]
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "stopping")
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        assert await asyncio.to_thread(server.process.wait, 120) == 0
        assert _logged(logs) == before


async def _waits(server: Server) -> bool:
    """Return whether a user waits for a model."""
    async with httpx.AsyncClient() as http:
        text = (await http.get(f"{server.metrics_url}/metrics")).text
    return "tokenwire_model_waiting_users 1.0" in text


def _logged(logs: Path) -> dict[str, str]:
    """Return what each service has logged."""
    return {file.name: file.read_text() for file in logs.iterdir()}
