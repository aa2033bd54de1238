"""CORS of the HTTP shim: allowed and refused origins."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from services.common.accounts.key_file import add_key
from services.http_shim.documentation.openapi import document
from tests.services.shim import running_shim
from tests.stack import Stack

OURS, OTHER = "http://localhost:3000", "https://other.example"
ASKED = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
BODY = {"prompt": "x = ", "max_tokens": 2}


@pytest.fixture(scope="module")
async def http(
    stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client with a key that permits five requests per minute."""
    keys = tmp_path_factory.mktemp("keys") / "keys.json"
    keys.write_text(json.dumps({"tiers": {"few": {"requests_per_minute": 5}}}))
    secret = add_key(keys, "few")
    flags = ("--cors-origins", f"https://a.example, {OURS}", "--keys", str(keys))
    headers = {"authorization": f"Bearer {secret}", "origin": OURS}
    async with (
        running_shim("--tokenizer", stack.tokenizer, *flags) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60, headers=headers) as client,
    ):
        yield client


def is_readable(response: httpx.Response) -> bool:
    """Return True if a page of `OURS` may read the answer and the API's headers."""
    shown = response.headers.get("access-control-expose-headers", "").split(", ")
    wanted = {"x-request-id", "x-tokens-used", "x-tokenwire-ignored", "retry-after"}
    return response.headers.get("access-control-allow-origin") == OURS and wanted <= {*shown}


async def test_preflight_needs_no_key(http: httpx.AsyncClient) -> None:
    """Browsers send no key with a preflight."""
    headers = ASKED | {"authorization": ""}
    response = await http.options("/v1/completions", headers=headers)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == OURS
    assert (
        response.headers["access-control-allow-headers"] == ASKED["access-control-request-headers"]
    )
    assert response.headers["x-request-id"]
    other = await http.options("/v1/completions", headers=headers | {"origin": OTHER})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("path", "method"),
    [(path, method) for path, item in document()["paths"].items() for method in item],
)
async def test_page_may_call_every_operation(
    http: httpx.AsyncClient, path: str, method: str
) -> None:
    headers = ASKED | {"access-control-request-method": method.upper()}
    response = await http.options(path, headers=headers)
    assert response.status_code == 200, response.text


async def test_allowed_origin_can_read_answers_streams_and_errors(http: httpx.AsyncClient) -> None:
    whole = await http.post("/v1/completions", json=BODY)
    streamed = await http.post("/v1/completions", json=BODY | {"stream": True})
    wrong = await http.post("/v1/completions", json=BODY | {"top_p": 7})
    nowhere = await http.get("/nowhere")
    other = await http.get("/v1/models", headers={"origin": OTHER})
    limited = await http.post("/v1/completions", json=BODY)
    nobody = await http.get("/v1/models", headers={"authorization": ""})
    answers = [whole, streamed, wrong, nowhere, limited, nobody]
    assert [answer.status_code for answer in answers] == [200, 200, 400, 404, 429, 401]
    assert all(map(is_readable, answers))
    assert other.status_code == 200
    assert "access-control-allow-origin" not in other.headers


async def test_no_origin_is_allowed_without_the_flag(stack: Stack) -> None:
    async with httpx.AsyncClient(base_url=stack.url, headers={"origin": OURS}) as http:
        assert (await http.options("/v1/completions", headers=ASKED)).status_code == 405
        answer = await http.get("/v1/models")
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("wrong", ["example.com", "https://a.example/", "null"])
async def test_invalid_origin_is_refused_at_the_start(wrong: str, tmp_path: Path) -> None:
    """An invalid origin would match no page, without any message."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.http_shim", "--port", "0", "--cors-origins", wrong,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    _, complaint = await process.communicate()
    assert process.returncode == 2
    assert complaint.decode().startswith(f"http_shim: {wrong} is not an origin")
