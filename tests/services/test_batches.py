"""/v1/files and /v1/batches: OpenAI's SDK, bad input, cancellation, and a server that restarts."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from openai.types import Batch

from services.jobs.store.file_store import FileStore, StoredBatch
from tests.services.shim import Shim, assert_documented, shim_with_jobs
from tests.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")

HANG_SECONDS = 120


def line(custom_id: str, path: str = "/v1/completions", **body: Any) -> str:
    fields = {"prompt": custom_id, "max_tokens": 3, **body} if path == "/v1/completions" else body
    request = {"custom_id": custom_id, "method": "POST", "url": path, "body": fields}
    return json.dumps(request)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def shim(stack: Stack) -> AsyncIterator[Shim]:
    async with shim_with_jobs(stack.tokenizer, "--max-file-bytes", "300000") as (shim, _):
        yield shim


def sdk(shim: Shim) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{shim.url}/v1", api_key="none", max_retries=0)


@pytest_asyncio.fixture(loop_scope="session")
async def client(shim: Shim) -> AsyncIterator[AsyncOpenAI]:
    async with sdk(shim) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def http(shim: Shim) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shim.url, timeout=60) as http:
        yield http


async def started(
    client: AsyncOpenAI, lines: Sequence[str], endpoint: Any = "/v1/completions"
) -> Batch:
    content = "".join(f"{each}\n" for each in lines).encode(errors="surrogateescape")
    file = await client.files.create(file=("in.jsonl", content), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", metadata={"for": "test"}
    )


async def some_counted(
    client: AsyncOpenAI, batch: Batch, count: Literal["total", "completed"]
) -> None:
    """Return once a count of a batch's lines is above zero, which no event tells."""
    counted = 0
    async with asyncio.timeout(HANG_SECONDS):
        while not counted:
            await asyncio.sleep(0.1)
            counts = (await client.batches.retrieve(batch.id)).request_counts
            counted = 0 if counts is None else getattr(counts, count)


async def ended(client: AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(HANG_SECONDS):
        while batch.status in ("in_progress", "cancelling"):
            await asyncio.sleep(0.1)  # the API has no event
            batch = await client.batches.retrieve(batch.id)
    return batch


async def answers(client: AsyncOpenAI, file_id: str | None) -> dict[str | None, Any]:
    if file_id is None:
        return {}
    text = (await client.files.content(file_id)).text
    return {each["custom_id"]: each for each in map(json.loads, text.splitlines())}


async def test_batch_goes_on_after_the_jobs_were_out_of_file_descriptors(stack: Stack) -> None:
    """/ready names the batches meanwhile. All requests use connections that exist."""
    async with (
        shim_with_jobs(stack.tokenizer) as (shim, jobs),
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
        sdk(shim) as client,
    ):
        content = f"{line('a')}\n".encode()
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (await http.get("/ready")).json() == {"status": "ready"}
        with jobs.out_of_descriptors():
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            await jobs.logged("the task batches failed")
            assert (await http.get("/ready")).json() == {"status": "ready", "faults": ["batches"]}
        batch = await ended(client, batch)
        assert batch.status == "completed"
        assert (await answers(client, batch.output_file_id)).keys() == {"a"}


async def test_line_with_more_elements_than_a_body_may_have_is_not_parsed(
    client: AsyncOpenAI,
) -> None:
    """All streams would stand still meanwhile."""
    many = json.dumps([[]] * 66_000, separators=(",", ":"))
    batch = await ended(
        client, await started(client, [line("a")[:-2] + f', "x": {many}}}}}', line("b")])
    )
    assert (await answers(client, batch.output_file_id)).keys() == {"b"}
    [[_, refused]] = (await answers(client, batch.error_file_id)).items()
    assert "lists and objects" in refused["error"]["message"]


async def test_every_line_gets_an_answer_or_an_error(client: AsyncOpenAI) -> None:
    lines = [line("a"), line("b"), "no JSON", line("c", model="nope"), line("d", "/v1/messages")]
    batch = await started(client, lines)
    assert_documented(batch.model_dump(exclude={"model", "usage"}), "BatchObject")
    batch = await ended(client, batch)
    assert batch.status == "completed"
    assert batch.metadata == {"for": "test"}
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (5, 2, 3)
    good = await answers(client, batch.output_file_id)
    assert good.keys() == {"a", "b"}
    assert good["a"]["response"]["status_code"] == 200
    assert good["a"]["response"]["request_id"].startswith("req_")
    assert good["a"]["response"]["body"]["usage"]["completion_tokens"] == 3
    bad = await answers(client, batch.error_file_id)
    assert bad["c"]["response"]["status_code"] == 404
    assert "The line is not JSON" in bad[None]["error"]["message"]
    assert batch.errors is not None
    assert [(error.code, error.line) for error in batch.errors.data or []] == [
        ("invalid_line", 3),
        ("invalid_line", 5),
    ]
    assert "url must be one of /v1/completions" in bad["d"]["error"]["message"]
    listed = await client.batches.list(limit=1)
    assert listed.data[0].id == batch.id


async def test_cancelled_batch_keeps_the_answers_that_it_has(client: AsyncOpenAI) -> None:
    lines = [line("short")] + [line(f"{i}", max_tokens=1900, ignore_eos=True) for i in range(70)]
    batch = await started(client, lines)
    await some_counted(client, batch, "completed")
    cancelled = await client.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")
    batch = await ended(client, batch)
    assert batch.status == "cancelled"
    assert "short" in await answers(client, batch.output_file_id)
    after = await ended(client, await started(client, [line("after")]))
    assert after.status == "completed"


async def test_queued_batch_is_cancelled_while_another_runs(client: AsyncOpenAI) -> None:
    long = [line(f"{i}", max_tokens=1900, ignore_eos=True) for i in range(70)]
    running = await started(client, long)
    await some_counted(client, running, "total")
    queued = await started(client, [line("never")])
    await client.batches.cancel(queued.id)
    assert (await ended(client, queued)).status == "cancelled"
    assert (await client.batches.retrieve(running.id)).status == "in_progress"
    await client.batches.cancel(running.id)
    await ended(client, running)


async def test_queued_batch_expires_while_another_runs(stack: Stack, tmp_path: Path) -> None:
    store = FileStore(str(tmp_path), 2**20)
    with store.adding("", "in.jsonl", "batch") as new:
        for i in range(70):
            new.write(line(f"{i}", max_tokens=1900, ignore_eos=True).encode() + b"\n")
    now = int(time.time())
    for identity, expires in (("batch_long", now + 3600), ("batch_late", now - 1)):
        store.add(StoredBatch(identity, "", "", "/v1/completions", new.stored.id, {}, now, expires))
    store.close()
    flags = ("--file-folder", str(tmp_path), "--grace", "0")
    async with shim_with_jobs(stack.tokenizer, *flags) as (shim, _), sdk(shim) as client:
        late = await ended(client, await client.batches.retrieve("batch_late"))
        assert late.status == "expired"
        assert (await client.batches.retrieve("batch_long")).status == "in_progress"


async def test_files_are_listed_read_and_deleted(
    client: AsyncOpenAI, http: httpx.AsyncClient
) -> None:
    file = await client.files.create(file=("x.jsonl", b"{}\n"), purpose="batch")
    assert (file.filename, file.bytes, file.purpose) == ("x.jsonl", 3, "batch")
    assert_documented((await http.get(f"/v1/files/{file.id}")).json(), "FileObject")
    assert (await client.files.list(limit=1)).data[0].id == file.id
    assert (await client.files.content(file.id)).content == b"{}\n"
    older = [each.id async for each in client.files.list(limit=1)]  # a page for each
    assert older[0] == file.id
    assert len(older) == len(set(older))
    oldest = [each.id async for each in client.files.list(limit=2, order="asc")]
    assert oldest == older[::-1]
    of_other_purpose = await client.files.list(purpose="batch_output", limit=1)
    assert file.id not in [each.id for each in of_other_purpose.data]
    assert (await client.files.delete(file.id)).deleted
    for path in (f"/v1/files/{file.id}", f"/v1/files/{file.id}/content", "/v1/batches/batch_x"):
        assert (await http.get(path)).status_code == 404


async def test_download_goes_on_where_it_was_interrupted(http: httpx.AsyncClient) -> None:
    """An output may have 512 MiB."""
    form: dict[str, Any] = {"files": {"file": ("a", b"0123456789")}, "data": {"purpose": "batch"}}
    path = f"/v1/files/{(await http.post('/v1/files', **form)).json()['id']}/content"
    rest = await http.get(path, headers={"range": "bytes=4-"})
    assert (rest.status_code, rest.content) == (206, b"456789")
    assert rest.headers["content-range"] == "bytes 4-9/10"
    whole = await http.get(path, headers={"range": "bytes=4-", "if-range": '"other"'})
    assert (whole.status_code, whole.content) == (200, b"0123456789")
    assert (await http.get(path, headers={"range": "bytes=10-"})).status_code == 416
    head = await http.head(path)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, "10", b"")


async def test_unknown_fields_of_a_form_are_named(http: httpx.AsyncClient) -> None:
    fields = {"purpose": "user_data", "expires_after[anchor]": "created_at"}
    answer = await http.post("/v1/files", data=fields, files={"file": ("a", b"x")})
    assert answer.status_code == 200
    assert answer.headers["x-tokenwire-ignored"] == "expires_after[anchor]"


async def test_wrong_input_names_its_field(http: httpx.AsyncClient) -> None:
    async def refused(path: str, **fields: Any) -> tuple[int, str | None]:
        answer = await http.post(path, **fields)
        return answer.status_code, answer.json()["error"]["param"]

    content = {"file": ("a", b"x")}
    purpose = {"purpose": "fine-tune"}
    assert await refused("/v1/files", json={}) == (400, "file")
    assert await refused("/v1/files", data={"purpose": "batch"}, files={"x": b""}) == (400, "file")
    assert await refused("/v1/files", data=purpose, files=content) == (400, "purpose")
    large = {"file": ("a", b"x" * 400_000)}
    assert (await refused("/v1/files", data={"purpose": "batch"}, files=large))[0] == 413
    garbage = {"content-type": "multipart/form-data; boundary=x"}
    assert await refused("/v1/files", content=b"garbage", headers=garbage) == (400, "file")
    batch = {"input_file_id": "file-x", "endpoint": "/v1/completions"}
    assert await refused("/v1/batches", json=batch) == (404, "input_file_id")
    elsewhere = batch | {"endpoint": "/v1/models"}
    assert await refused("/v1/batches", json=elsewhere) == (400, "endpoint")
    soon = batch | {"completion_window": "1h"}
    assert await refused("/v1/batches", json=soon) == (400, "completion_window")


async def test_batch_goes_on_after_a_restart(stack: Stack, tmp_path: Path) -> None:
    """What was answered before is not asked again."""
    flags = ("--file-folder", str(tmp_path / "files"))
    lines = [line("first")] + [line(f"{i}", max_tokens=200, ignore_eos=True) for i in range(70)]
    async with (
        shim_with_jobs(stack.tokenizer, *flags, "--grace", "0") as (shim, _),
        sdk(shim) as client,
    ):
        batch = await started(client, lines)
        await some_counted(client, batch, "completed")
    kept = (tmp_path / "files" / batch.id).read_text()
    first = next(each for each in map(json.loads, kept.splitlines()) if each["response"])
    async with shim_with_jobs(stack.tokenizer, *flags) as (shim, _), sdk(shim) as client:
        batch = await ended(client, batch)
        assert batch.status == "completed"
        good = await answers(client, batch.output_file_id)
    assert len(good) == 71
    again = good[first["custom_id"]]["response"]
    assert again["request_id"] == first["response"]["request_id"]


async def test_restart_repeats_no_line_and_no_custom_id(stack: Stack, tmp_path: Path) -> None:
    """A refused line is not sent again; a line whose custom_id is taken stays refused."""
    flags = ("--file-folder", str(tmp_path / "files"))
    lines = [line("a"), line("a"), line("bad", model="nope"), "no JSON"]
    lines += [line(f"{i}", max_tokens=200, ignore_eos=True) for i in range(70)]
    async with (
        shim_with_jobs(stack.tokenizer, *flags, "--grace", "0") as (shim, _),
        sdk(shim) as client,
    ):
        batch = await started(client, lines)
        await some_counted(client, batch, "completed")
    kept = [json.loads(each) for each in (tmp_path / "files" / batch.id).read_text().splitlines()]
    before = {
        each["custom_id"]: each["response"]["request_id"] for each in kept if each["response"]
    }
    assert {"a", "bad"} <= before.keys()
    async with shim_with_jobs(stack.tokenizer, *flags) as (shim, _), sdk(shim) as client:
        batch = await ended(client, batch)
        counts = batch.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (74, 71, 3)
        good = (await client.files.content(batch.output_file_id or "")).text
        bad = (await client.files.content(batch.error_file_id or "")).text
    answered = [json.loads(each) for each in (good + bad).splitlines()]
    assert len(answered) == len({each["id"] for each in map(json.loads, good.splitlines())}) + 3
    for custom_id, request_id in before.items():
        sent = [each for each in answered if each["custom_id"] == custom_id and each["response"]]
        assert [each["response"]["request_id"] for each in sent] == [request_id]
    assert "This custom_id stands in an earlier line" in bad


async def test_output_is_bounded(stack: Stack, tmp_path: Path) -> None:
    """A batch ends when its output or the store is full, with the answers until then."""
    flags = ("--file-folder", str(tmp_path / "files"))
    limits = ("--max-output-bytes", "20000", "--max-files-bytes", "60000")
    async with shim_with_jobs(stack.tokenizer, *flags, *limits) as (shim, _), sdk(shim) as client:
        batch = await ended(client, await started(client, [line(f"{i}") for i in range(100)]))
        assert batch.status == "failed"
        assert batch.errors is not None
        assert batch.errors.data is not None
        assert batch.errors.data[0].code == "output_too_large"
        output = (await client.files.content(batch.output_file_id or "")).content
        assert len(output.splitlines()) > 5
        assert len(output) <= 20_000
        other = await ended(client, await started(client, [line(f"{i}") for i in range(100)]))
        assert other.errors is not None
        assert other.errors.data is not None
        assert other.errors.data[0].code == "files_full"
        listed = (await client.files.list(limit=100)).data
        assert sum(each.bytes for each in listed) <= 60_000


async def test_two_jobs_services_share_a_folder(stack: Stack, tmp_path: Path) -> None:
    """One of them runs the batches; both show and cancel them, as while one replaces the other."""
    flags = ("--file-folder", str(tmp_path / "files"))
    async with (
        shim_with_jobs(stack.tokenizer, *flags, "--grace", "0") as (one, _),
        shim_with_jobs(stack.tokenizer, *flags, "--grace", "0") as (other, _),
        sdk(one) as first,
        sdk(other) as second,
    ):
        done = await ended(first, await started(second, [line("a")]))
        assert done.status == "completed"
        assert (await answers(second, done.output_file_id)).keys() == {"a"}
        long = await started(
            first, [line(f"{i}", max_tokens=1900, ignore_eos=True) for i in range(70)]
        )
        waiting = await started(second, [line("never")])
        assert (await second.batches.cancel(waiting.id)).status == "cancelling"
        assert (await second.batches.cancel(long.id)).status == "cancelling"
        for batch in (long, waiting):
            assert (await ended(first, batch)).status == "cancelled"
        assert (await first.batches.retrieve(waiting.id)).output_file_id is None


async def test_page_after_an_unknown_id_is_refused(http: httpx.AsyncClient) -> None:
    for path in ("/v1/files", "/v1/batches"):
        for query, param in (("after=x", "after"), ("limit=0", "limit"), ("order=up", "order")):
            answer = await http.get(f"{path}?{query}")
            assert answer.status_code == 400
            assert answer.json()["error"]["param"] == param


async def test_list_with_a_limit_above_the_most_has_what_there_is(client: AsyncOpenAI) -> None:
    batch = await ended(client, await started(client, [line("a")]))
    assert (await client.batches.list(limit=5_000)).data[0].id == batch.id
    listed = await client.files.list(limit=10_000)
    assert batch.input_file_id in {each.id for each in listed.data}


async def test_byte_order_mark_is_no_part_of_the_first_line(client: AsyncOpenAI) -> None:
    batch = await ended(client, await started(client, ["\ufeff" + line("a"), line("b")]))
    assert (await answers(client, batch.output_file_id)).keys() == {"a", "b"}


async def test_file_that_is_not_utf_8_fails_with_its_line_and_no_path(
    client: AsyncOpenAI,
) -> None:
    batch = await ended(client, await started(client, [*map(line, map(str, range(200))), "\udcff"]))
    assert batch.status == "failed"
    assert batch.errors is not None
    [error] = batch.errors.data or []
    assert (error.line, error.message) == (201, "Line 201 is not UTF-8.")


@pytest.mark.parametrize(
    ("lines", "number", "why"),
    [
        (["%PDF-1.7", "1 0 obj"], 1, "The file is a PDF: a batch has one JSON object a line."),
        (["[", line("a"), "]"], 1, "The file is a JSON array: a batch has one JSON object a line"),
        (["name;age", *["Ann;3"] * 20], 1, "The line is not JSON: Expecting value at character 1."),
    ],
)
async def test_file_without_a_request_fails_and_says_why(
    client: AsyncOpenAI, lines: list[str], number: int, why: str
) -> None:
    """Its owner would otherwise read a count of failures."""
    batch = await ended(client, await started(client, lines))
    assert batch.status == "failed"
    assert batch.errors is not None
    errors = batch.errors.data or []
    assert 0 < len(errors) <= 10
    assert errors[0].line == number
    assert (errors[0].message or "").startswith(why)


async def test_file_of_too_many_lines_fails_and_others_go_on(client: AsyncOpenAI) -> None:
    """Lines that can't be sent take no time that streams need."""
    too_many = await started(client, ["0"] * 49_000 + [""] * 2_000)
    batch = await ended(client, too_many)
    assert batch.status == "failed"
    assert batch.errors is not None
    assert batch.errors.data is not None
    [error] = batch.errors.data
    assert (error.line, error.message) == (50_001, "There are more than 50,000 lines.")
    bad = await ended(client, await started(client, ["0"] * 2_000 + [line("a")]))
    assert bad.request_counts is not None
    assert (bad.request_counts.completed, bad.request_counts.failed) == (1, 2_000)


async def test_embeddings_have_no_batch_on_a_model_that_makes_none(client: AsyncOpenAI) -> None:
    batch = await started(client, [line("a", "/v1/embeddings", input="a")], "/v1/embeddings")
    batch = await ended(client, batch)
    bad = await answers(client, batch.error_file_id)
    assert bad["a"]["response"]["status_code"] == 400
