"""Stores of responses and files that fail while the jobs service serves."""

import asyncio
import json
import resource
import shutil
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.services.shim import Shim, shim_with_jobs
from tests.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")
HANG_SECONDS = 60
BODY = {"input": "def f():", "max_output_tokens": 2}


@asynccontextmanager
async def stored(stack: Stack, folder: Path) -> AsyncIterator[tuple[Shim, httpx.AsyncClient]]:
    """Run a shim and jobs with both stores in a folder; yield the jobs with a client."""
    flags = ("--response-store", str(folder / "responses"), "--file-folder", str(folder / "files"))
    async with (
        shim_with_jobs(stack.tokenizer, *flags) as (shim, jobs),
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        yield jobs, http


async def upload(http: httpx.AsyncClient) -> httpx.Response:
    files = {"file": ("a.jsonl", b"{}")}
    return await http.post("/v1/files", files=files, data={"purpose": "batch"})


async def respond(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await http.post("/v1/responses", json={**BODY, **fields})


async def faults(http: httpx.AsyncClient) -> list[str]:
    ready = await http.get("/ready")
    assert ready.status_code == 200
    named: list[str] = ready.json().get("faults", [])
    return named


def assert_try_again(reply: httpx.Response, code: str) -> None:
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, code)
    assert int(reply.headers["retry-after"]) >= 1


async def test_locked_store_of_responses_asks_for_another_try(stack: Stack, tmp_path: Path) -> None:
    async with stored(stack, tmp_path) as (_, http):
        kept = (await respond(http)).json()["id"]
        with sqlite3.connect(tmp_path / "responses", isolation_level=None) as other:
            other.execute("BEGIN EXCLUSIVE")
            assert_try_again(await http.delete(f"/v1/responses/{kept}"), "responses_unavailable")
            assert_try_again(await respond(http, background=True), "responses_unavailable")
            whole = (await respond(http)).json()
            assert (whole["status"], whole["store"]) == ("incomplete", False)
            streamed = (await respond(http, stream=True)).text.splitlines()
            last = json.loads([line for line in streamed if line.startswith("data:")][-1][5:])
            assert last["response"]["store"] is False
            other.execute("ROLLBACK")
        assert (await http.delete(f"/v1/responses/{kept}")).status_code == 200


async def test_removed_folder_takes_no_uploads_and_is_named(stack: Stack, tmp_path: Path) -> None:
    """A file in a removed folder is lost when the server ends."""
    async with stored(stack, tmp_path) as (_, http):
        file = (await upload(http)).json()["id"]
        assert (await http.get("/ready")).json() == {"status": "ready"}
        shutil.rmtree(tmp_path / "files")
        refused = await upload(http)
        assert_try_again(refused, "files_unavailable")
        assert "was removed" in refused.json()["error"]["message"]
        assert_try_again(await http.get(f"/v1/files/{file}"), "files_unavailable")
        (tmp_path / "responses").unlink()
        async with asyncio.timeout(HANG_SECONDS):
            while not {"files", "responses"} <= {*await faults(http)}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # the jobs look for their files once a second
        assert (await respond(http, store=False)).status_code == 200


async def test_content_that_is_gone_is_no_internal_error(stack: Stack, tmp_path: Path) -> None:
    async with stored(stack, tmp_path) as (_, http):
        file = (await upload(http)).json()["id"]
        (tmp_path / "files" / file).unlink()
        gone = await http.get(f"/v1/files/{file}/content")
        assert gone.status_code == 404
        assert "gone" in gone.json()["error"]["message"]


async def test_response_in_the_background_on_a_full_disk_asks_for_another_try(
    stack: Stack, tmp_path: Path
) -> None:
    """400 would tell the client that its request is wrong."""
    async with stored(stack, tmp_path) as (jobs, http):
        await respond(http)
        pid = jobs.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, before[1]))  # no file can grow
        assert_try_again(await respond(http, background=True), "responses_unavailable")
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)
        assert (await respond(http, background=True)).status_code == 200
