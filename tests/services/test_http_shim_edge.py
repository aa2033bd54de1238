"""Isolation at the HTTP shim: oversized bodies, host names, tenants, internal addresses, logs."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.services.shim import Shim, running_shim
from tests.stack import Stack, free_ports, mortal_engine, running_service

MANY = 1_000_000
HANG_SECONDS = 60
PROMPT = "import json\n" * 40
JSON_TYPE = {"content-type": "application/json"}


@pytest.fixture(scope="module")
async def shim(stack: Stack) -> AsyncIterator[Shim]:
    async with running_shim("--tokenizer", stack.tokenizer) as running:
        yield running


@pytest.fixture
async def http(shim: Shim) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shim.url, timeout=HANG_SECONDS) as client:
        yield client


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt":[%b]}' % b",".join([b"[1]"] * MANY)),
        ("/v1/completions", b'{"prompt":"","stop":[%b]}' % b",".join([b'"a"'] * MANY)),
        ("/v1/chat/completions", b'{"messages":[%b]}' % b",".join([b"{}"] * MANY)),
        ("/v1/completion", b'{"prompt":"","model":[%b]}' % b",".join([b'"a"'] * MANY)),
        ("/tokenize", b'{"prompt":"",%b}' % b",".join([b'"a":1'] * MANY)),
        ("/detokenize", b'{"tokens":[%b]}' % b",".join([b"1"] * 2 * MANY)),
    ],
)
async def test_body_with_too_many_values_is_refused(
    http: httpx.AsyncClient, path: str, body: bytes
) -> None:
    answer = await http.post(path, content=body, headers=JSON_TYPE)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "invalid_body"
    assert "the limit is" in error["message"]


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/files/file-1", "DELETE, GET, HEAD"),
        ("/v1/batches", "GET, HEAD, POST"),
        ("/v1/responses/resp_1", "DELETE, GET, HEAD"),
        ("/v1/completions", "POST"),
    ],
)
async def test_refused_method_names_all_others(
    http: httpx.AsyncClient, path: str, methods: str
) -> None:
    answer = await http.put(path)
    assert answer.status_code == 405
    assert answer.headers["allow"] == methods


async def status_of(shim: Shim, head: str) -> int:
    """Send a raw request head, and return the status of the answer."""
    url = httpx.URL(shim.url)
    async with asyncio.timeout(HANG_SECONDS):
        reader, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode())
        status = int((await reader.readline()).split()[1])
        writer.close()
    return status


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET /health HTTP/1.1\r\nHost: localhost:1", 200),
        ("GET /health HTTP/1.1\r\nHost: [::1]", 200),
        ("GET /health HTTP/1.0", 200),
        ("GET /health HTTP/1.1\r\nHost: rebound.example", 400),
        ("GET /v1/models HTTP/1.1\r\nHost: rebound.example:80", 400),
        ("GET / HTTP/1.0\r\nHost: rebound.example", 400),
        ("GET /health HTTP/1.1\r\nX: y", 400),
        ("GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost", 400),
    ],
)
async def test_loopback_server_refuses_other_host_names(shim: Shim, head: str, status: int) -> None:
    """DNS rebinding: a web page whose name resolves to loopback could read the answers."""
    assert await status_of(shim, head) == status


async def test_allowed_host_names_are_accepted(stack: Stack) -> None:
    flags = ("--tokenizer", stack.tokenizer, "--allowed-hosts", "models.example, other.example")
    async with running_shim(*flags) as shim:
        for name, status in (("models.example:8000", 200), ("other.example", 200), ("x.y", 400)):
            assert await status_of(shim, f"GET /health HTTP/1.1\r\nHost: {name}") == status


async def test_server_beyond_loopback_accepts_any_host_name(stack: Stack) -> None:
    """Containers address it as `http_shim:8000`."""
    async with running_shim("--tokenizer", stack.tokenizer, "--host", "0.0.0.0", "--open") as shim:
        assert await status_of(shim, "GET /health HTTP/1.1\r\nHost: http_shim:8000") == 200


async def test_metrics_port_removes_metrics_from_the_api_port(stack: Stack) -> None:
    [port] = free_ports(1)
    flags = ("--tokenizer", stack.tokenizer, "--metrics-port", str(port))
    async with running_shim(*flags) as shim, httpx.AsyncClient() as http:
        assert (await http.get(f"{shim.url}/metrics")).status_code == 404
        metrics = await http.get(f"http://127.0.0.1:{port}/metrics")
        assert "tokenwire_http_requests_total" in metrics.text


async def cached(http: httpx.AsyncClient, **headers: str) -> int:
    body = {"prompt": PROMPT, "max_tokens": 1}
    answer = await http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["cached_input_tokens"]
    return tokens


async def test_trusted_tenant_has_its_own_prefix_cache(http: httpx.AsyncClient) -> None:
    acme = {"x-tenant": "acme", "x-priority": "1"}
    await cached(http, **acme)
    assert await cached(http, **acme) > 0
    assert await cached(http, **{"x-tenant": "other"}) == 0


async def test_untrusted_scheduling_headers_are_reported_as_ignored(stack: Stack) -> None:
    flags = ("--tokenizer", stack.tokenizer, "--trust-scheduling-headers", "never")
    async with (
        running_shim(*flags) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=HANG_SECONDS) as http,
    ):
        await cached(http)
        assert await cached(http, **{"x-tenant": "untrusted"}) > 0
        body = {"prompt": "x", "max_tokens": 1, "what": 1}
        answer = await http.post("/v1/completions", json=body, headers={"x-priority": "high"})
        assert answer.headers["x-tokenwire-ignored"] == "x-priority, what"


async def test_errors_show_no_addresses_of_services(embedded_model: Path, tmp_path: Path) -> None:
    """gRPC's own error messages contain the addresses of a killed engine."""
    async with mortal_engine(embedded_model) as engine:
        arguments = ("--model", str(embedded_model), "--engine", engine.target)
        patience = ("--engine-wait", "0.5")
        log = tmp_path / "tokenizer.log"
        async with (
            running_service("tokenizer", *arguments, *patience, log=log) as tokenizer,
            running_shim("--tokenizer", tokenizer.target) as shim,
            httpx.AsyncClient(base_url=shim.url, timeout=HANG_SECONDS) as http,
        ):
            await engine.kill()
            lost = await http.post("/v1/completions", json={"prompt": "x"})
            assert (lost.status_code, lost.json()["error"]["code"]) == (503, "engine_lost")
            assert await tokenizer.stop() == 0
            gone = await http.post("/v1/completions", json={"prompt": "x"})
            assert gone.status_code == 503
            listed = await http.get("/v1/models")
            assert listed.status_code == 503
            for answer in (lost, gone, listed, await http.get("/ready")):
                for hidden in ("127.0.0.1", "ipv4", *engine.target.split(":")[1:]):
                    assert hidden not in answer.text


@pytest.mark.parametrize("level", ["info", "debug"])
async def test_client_content_is_logged_only_at_debug_level(
    stack: Stack, embedded_model: Path, tmp_path: Path, level: str
) -> None:
    log = tmp_path / "tokenizer.log"
    arguments = ("--model", str(embedded_model), "--engine", stack.engine, "--log-level", level)
    async with (
        running_service("tokenizer", *arguments, log=log) as tokenizer,
        running_shim("--tokenizer", tokenizer.target, "--log-level", level) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=HANG_SECONDS) as http,
    ):
        body = {
            "prompt": "x",
            "user": "alice@example.org",
            "grammar": {"type": "lark", "value": 'start: "secret-word" ('},
        }
        named = {"x-request-id": "private"}
        answer = await http.post("/v1/completions", json=body, headers=named)
        assert answer.json()["error"]["code"] == "invalid_grammar"
        of_shim = json.dumps(await shim.answered("private"))
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    told = of_shim + json.dumps([line for line in lines if line.get("request_id") == "private"])
    assert "INVALID_GRAMMAR" in told
    is_debugging = level == "debug"
    assert ("alice@example.org" in told) is is_debugging
    assert (answer.json()["error"]["message"][:20] in told) is is_debugging
