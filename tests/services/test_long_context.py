"""A model whose context is longer than the memory has room for."""

import asyncio
import json
import shutil
import sys
from pathlib import Path

import httpx
import pytest

from tests.services.shim import running_shim
from tests.stack import running_service
from tokenwire.client import Client

STATED, KV_BYTES = 131_072, 4 << 20


@pytest.fixture(scope="module")
def long_model(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the embedded model with a config.json that states a long context."""
    model = tmp_path_factory.mktemp("long") / "long"
    shutil.copytree(embedded_model, model)
    file = model / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"max_position_embeddings": STATED}))
    return model


async def test_every_api_states_the_context_that_fits(long_model: Path, tmp_path: Path) -> None:
    """A client that plans for the stated context must not run into another limit."""
    model = ("--model", str(long_model))
    small = ("--kv-memory", str(KV_BYTES), "--dtype", "float32")
    async with (
        running_service("engine", *model, *small, log=tmp_path / "engine") as engine,
        running_service(
            "tokenizer", *model, "--engine", engine.target, log=tmp_path / "tokenizer"
        ) as tokenizer,
        running_shim("--tokenizer", tokenizer.target) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=120) as http,
    ):
        async with Client(tokenizer.target) as client:
            [listed] = await client.models()
        context = listed.context_length
        assert 512 <= context < STATED
        [card] = (await http.get("/v1/models")).json()["data"]
        assert card["max_model_len"] == context
        body = {"model": "long", "prompt": [7] * (context + 1), "max_tokens": 1}
        refused = await http.post("/v1/completions", json=body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"{context:,}" in error["message"]
        body = {"model": "long", "prompt": [7] * (context - 2), "max_tokens": 9}
        answer = (await http.post("/v1/completions", json=body | {"ignore_eos": True})).json()
        assert answer["usage"]["total_tokens"] == context
    said = (tmp_path / "engine").read_text()
    assert f"context {context:,} of 131,072 tokens" in said


async def test_context_that_cannot_fit_is_refused_at_the_start(long_model: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.engine", "--port", "0", "--metrics-port", "-1"),
        *("--model", str(long_model), "--kv-memory", "4MiB", "--context-length", "max"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, stderr = await process.communicate()
    assert process.returncode == 2
    assert b"of KV cache, more than --kv-memory 4MiB" in stderr.splitlines()[-1]
