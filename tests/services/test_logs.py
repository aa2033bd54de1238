"""Logs of the services: traces, refusals and aborted streams."""

import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest

from tests.services.shim import Shim, running_shim
from tests.stack import Stack, running_service

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_trace_id_is_in_every_services_log(embedded_model: Path, tmp_path: Path) -> None:
    model = ("--model", str(embedded_model))
    logs = {name: tmp_path / f"{name}.log" for name in ("grammar", "engine", "tokenizer")}
    few = ("--dtype", "float32", "--kv-memory", "64MiB")
    async with (
        running_service("grammar", *model, log=logs["grammar"]) as grammar,
        running_service(
            "engine", *model, *few, "--grammar", grammar.target, log=logs["engine"]
        ) as engine,
        running_service(
            "tokenizer", *model, "--engine", engine.target, log=logs["tokenizer"]
        ) as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        body = {
            "model": "tokenwire-code-6m",
            "prompt": "x = ",
            "max_tokens": 4,
            "grammar": {"type": "regex", "value": "[0-9]+"},
        }
        names = {"x-request-id": "traced", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        answer = await http.post("/v1/completions", json=body, headers=names)
        assert answer.status_code == 200
        assert (await shim.answered("traced"))["trace_id"] == TRACE
        assert (await http.post("/tokenize", json={"prompt": "x"}, headers=names)).is_success
        body["prompt"] = "y = "
        untraced = {"x-request-id": "untraced", "traceparent": "not a trace"}
        assert (await http.post("/v1/completions", json=body, headers=untraced)).is_success
        assert "trace_id" not in await shim.answered("untraced")
        assert (await http.get("/status.json")).json()["models"][0]["reachable"]
    written = "".join(log.read_text() for log in logs.values())
    assert "GetStatus" not in written, "repeated calls"
    assert "ListModels" not in written, "repeated calls"
    for log in logs.values():
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        named = {
            identity: [line for line in lines if line.get("request_id") == identity]
            for identity in ("traced", "untraced")
        }
        assert named["traced"]
        assert all(line["trace_id"] == TRACE for line in named["traced"])
        assert not any("trace_id" in line for line in named["untraced"])


@pytest.fixture(scope="module", params=["info", "debug"])
def level(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(scope="module")
async def shim(stack: Stack, level: str) -> AsyncIterator[Shim]:
    """A shim that logs at the level."""
    async with running_shim("--tokenizer", stack.tokenizer, "--log-level", level) as shim:
        yield shim


@pytest.fixture
async def http(shim: Shim) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shim.url, timeout=60) as http:
        yield http


@pytest.mark.parametrize(
    ("path", "body", "reason", "field"),
    [
        ("/v1/completions", {"prompt": "x", "stop": ["secret"] * 99}, "INVALID_FIELD", "stop"),
        ("/v1/completions", {"prompt": "x", "model": "secret"}, "MODEL_NOT_FOUND", "model"),
        ("/v1/completions", {"prompt": "", "logit_bias": {"secret": 1}}, "INVALID_FIELD", None),
        ("/secret", {}, "NOT_FOUND", None),
    ],
)
async def test_log_has_the_reason_of_a_refusal_and_only_at_debug_its_text(
    shim: Shim,
    http: httpx.AsyncClient,
    level: str,
    path: str,
    body: dict[str, object],
    reason: str,
    field: str | None,
) -> None:
    """docs/security.md promises that no text of clients is logged otherwise."""
    identity = uuid4().hex
    answer = await http.post(path, json=body, headers={"x-request-id": identity})
    line = await shim.answered(identity)
    assert (line["status"], line["reason"]) == (answer.status_code, reason)
    assert field is None or line["field"] == field
    if level == "info":
        assert "secret" not in json.dumps(line)
    else:
        assert line["error"] == answer.json()["error"]["message"]
        assert line["path"] == path


async def test_long_path_makes_neither_a_long_line_nor_a_long_answer(
    shim: Shim, http: httpx.AsyncClient
) -> None:
    """A few thousand such requests would rotate all logs away."""
    named = {"x-request-id": "long"}
    answer = await http.get("/v1/models/" + "a" * 60_000, headers=named)
    assert answer.status_code == 404
    assert len(answer.content) < 3_000
    line = await shim.answered("long")
    assert line["message"] == "GET /v1/models/{model:path}"
    assert len(json.dumps(line)) < 3_000


@pytest.mark.parametrize("level", ["debug"], indirect=True)
async def test_level_debug_shows_no_lines_of_grpc(shim: Shim, http: httpx.AsyncClient) -> None:
    """They would bury the shim's own line in some ten others for each request."""
    body = {"prompt": "x", "max_tokens": 2}
    names = {"x-request-id": "debugged"}
    answer = await http.post("/v1/completions", json=body, headers=names)
    assert answer.status_code == 200
    await shim.answered("debugged")
    assert shim.count("GET /health") == 0
    assert (await http.get("/health")).status_code == 200
    await shim.logged("GET /health")
    assert shim.count("_cygrpc") == 0


async def test_stream_cut_by_shutdown_ends_with_an_error_and_is_logged(stack: Stack) -> None:
    """The client receives an error event, and the log has no traceback."""
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    names = {"x-request-id": "cut"}
    async with (
        running_shim("--tokenizer", stack.tokenizer, "--grace", "0.1") as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
        http.stream("POST", "/v1/completions", json=body | {"n": 8}, headers=names) as answer,
    ):
        lines = answer.aiter_lines()
        await anext(lines)
        shim.process.send_signal(signal.SIGTERM)
        events = [line async for line in lines if line]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "stopping"
        line = await shim.answered("cut")
        assert (line["status"], line["reason"]) == (503, "STOPPING")
        await shim.process.wait()
        assert not shim.count("Exception")
