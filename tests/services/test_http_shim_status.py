"""GET /status.json: an operator sees what each model does, and which one is away."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.shim import Shim, assert_documented, running_shim
from tests.stack import Stack, free_ports, running_service

PROMPT = "def add(a, b):\n    return a +"
LONG = {"prompt": PROMPT, "max_tokens": 1_900, "n": 32, "ignore_eos": True, "stream": True}
"""A request of half a minute, which still runs after every wait of its test"""


@pytest.fixture(scope="module")
async def shim(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Shim]:
    """Yield a shim of one model that is served, one that is away, and a placeholder."""
    (nobody,) = free_ports(1)
    catalog = tmp_path_factory.mktemp("catalog") / "catalog.toml"
    catalog.write_text(f"""
[[models]]
id = "here"
target = "{stack.tokenizer}"

[[models]]
id = "away"
target = "127.0.0.1:{nobody}"

[[models]]
id = "soon"
placeholder = true
""")
    async with running_shim("--catalog", str(catalog)) as running:
        yield running


@pytest.fixture
async def http(shim: Shim) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shim.url, timeout=60) as client:
        yield client


async def status(http: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    """Return the statuses of the models by id."""
    response = await http.get("/status.json")
    assert response.status_code == 200
    assert_documented(response.json(), "Status")
    return {each["id"]: each for each in response.json()["models"]}


async def test_counts_grow_with_a_request(http: httpx.AsyncClient) -> None:
    before = (await status(http))["here"]
    body = {"model": "here", "prompt": PROMPT, "max_tokens": 4, "ignore_eos": True}
    usage = (await http.post("/v1/completions", json=body)).json()["usage"]
    after = (await status(http))["here"]
    assert after["prompt_tokens"] == before["prompt_tokens"] + usage["prompt_tokens"]
    assert after["completion_tokens"] == before["completion_tokens"] + 4
    assert after["requests"]["ok"] == before["requests"].get("ok", 0) + 1
    assert after["first_token"]["count"] >= 1
    assert 0 < after["first_token"]["p50_seconds"] <= after["first_token"]["p95_seconds"]
    assert after["uptime_seconds"] > before["uptime_seconds"]


async def test_running_request_holds_blocks_until_its_client_leaves(
    http: httpx.AsyncClient,
) -> None:
    async with http.stream("POST", "/v1/completions", json={**LONG, "model": "here"}) as response:
        lines = response.aiter_lines()  # held, because its end would close the connection
        await anext(lines)
        seen = (await status(http))["here"]
        while not seen["engines"][0]["running_sequences"]:
            seen = (await status(http))["here"]
        assert seen["running_requests"] == 1
        [engine] = seen["engines"]
        assert 0 < engine["kv_used_blocks"] < engine["kv_blocks"]
        assert engine["kernels"]
        weights, cache = engine["memory"]
        assert (weights["kind"], cache["kind"]) == ("weights", "kv_cache")
        assert weights["bytes"] > 1_000_000
        assert 0 < cache["used_bytes"] + cache["cached_bytes"] <= cache["bytes"]
    while seen["running_requests"] or seen["engines"][0]["running_sequences"]:
        seen = (await status(http))["here"]


async def test_model_without_its_service_is_named(http: httpx.AsyncClient) -> None:
    models = await status(http)
    assert list(models) == ["here", "away"]
    assert models["away"]["reachable"] is False
    assert models["away"]["requests"] is None


async def test_server_of_one_model_names_it_while_its_service_is_away(
    stack: Stack, tmp_path: Path
) -> None:
    arguments = ("--model", str(stack.model), "--engine", stack.engine)
    async with (
        running_service("tokenizer", *arguments, log=tmp_path / "log") as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        assert (await status(http))[stack.model_id]["reachable"] is True
        await tokenizer.stop()
        assert (await status(http))[stack.model_id]["reachable"] is False


async def test_tokenizer_without_its_engine_still_gives_its_counts(
    stack: Stack, tmp_path: Path
) -> None:
    engine_arguments = ("--model", str(stack.model), "--kv-memory", "16MiB")
    async with running_service("engine", *engine_arguments, log=tmp_path / "engine") as engine:
        arguments = ("--model", str(stack.model), "--engine", engine.target)
        async with (
            running_service("tokenizer", *arguments, log=tmp_path / "log") as tokenizer,
            running_shim("--tokenizer", tokenizer.target) as shim,
            httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
        ):
            assert (await status(http))[stack.model_id]["engines"][0]["kv_blocks"] > 0
            await engine.stop()
            seen = (await status(http))[stack.model_id]
            assert seen["reachable"] is True
            assert seen["engines"][0]["state"] == "away"
