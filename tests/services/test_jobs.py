"""The jobs service: behind several shims, behind none, killed, and called by gRPC."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from services.common.accounts.key_file import add_key
from tests.pdfs import pdf
from tests.services.shim import running_jobs, running_shim, shim_with_jobs
from tests.stack import Stack, free_ports
from tokenwire.channel import connect
from tokenwire.errors import ServiceError
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.jobs.v1.jobs_pb2_grpc import (
    BatchServiceStub,
    FileServiceStub,
    ResponseServiceStub,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")

HANG_SECONDS = 120
ASKED = {"input": "def f():", "max_output_tokens": 2}
NUMBERS = {"type": "array", "items": {"enum": [1, 2]}, "minItems": 600, "maxItems": 600}
LONG = ASKED | {
    "text": {"format": {"type": "json_schema", "name": "numbers", "schema": NUMBERS}},
    "max_output_tokens": 1_800,
    "background": True,
}
"""A response that takes some seconds"""
PURPOSE = {"purpose": "batch"}


def client_of(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60)


def lines(count: int, **body: Any) -> bytes:
    requests = (
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": str(number), "max_tokens": 2} | body,
        }
        for number in range(count)
    )
    return "".join(f"{json.dumps(each)}\n" for each in requests).encode()


async def started(http: httpx.AsyncClient, content: bytes) -> str:
    """Upload a file and start its batch; return the batch's id."""
    files = {"file": ("in.jsonl", content)}
    file = (await http.post("/v1/files", files=files, data=PURPOSE)).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions"}
    identity: str = (await http.post("/v1/batches", json=body)).json()["id"]
    return identity


async def ended(http: httpx.AsyncClient, path: str) -> dict[str, Any]:
    """Return a batch or a response once it has ended, which no event tells."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            answer: dict[str, Any] = (await http.get(path)).json()
            if answer["status"] not in ("queued", "in_progress", "cancelling"):
                return answer
            await asyncio.sleep(0.1)


async def test_two_shims_answer_for_the_same_response_file_and_batch(stack: Stack) -> None:
    served = ("--tokenizer", stack.tokenizer)
    async with (
        running_jobs(*served) as jobs,
        running_shim(*served, "--jobs", jobs.target) as one,
        running_shim(*served, "--jobs", jobs.target) as other,
        client_of(one.url) as first,
        client_of(other.url) as second,
    ):
        kept = (await first.post("/v1/responses", json=ASKED)).json()
        assert (await second.get(f"/v1/responses/{kept['id']}")).json() == kept
        follows = ASKED | {"previous_response_id": kept["id"]}
        assert (await second.post("/v1/responses", json=follows)).status_code == 200
        items = (await second.get(f"/v1/responses/{kept['id']}/input_items")).json()
        assert [item["role"] for item in items["data"]] == ["user"]
        batch = await started(first, lines(3))
        done = await ended(second, f"/v1/batches/{batch}")
        assert done["request_counts"] == {"total": 3, "completed": 3, "failed": 0}
        path = f"/v1/files/{done['output_file_id']}/content"
        contents = [(await each.get(path)).content for each in (first, second)]
        assert contents[0] == contents[1]
        assert len(contents[0].splitlines()) == 3
        assert (await second.delete(f"/v1/responses/{kept['id']}")).status_code == 200
        assert (await first.get(f"/v1/responses/{kept['id']}")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("POST", "/v1/files", {"files": {"file": ("a", b"x")}, "data": PURPOSE}),
        ("GET", "/v1/files", {}),
        ("GET", "/v1/files/file-1/content", {}),
        ("GET", "/v1/batches", {}),
        (
            "POST",
            "/v1/batches",
            {"json": {"input_file_id": "file-1", "endpoint": "/v1/completions"}},
        ),
        ("GET", "/v1/responses/resp_1", {}),
        ("GET", "/v1/responses/resp_1?stream=true", {}),
        ("POST", "/v1/responses", {"json": ASKED | {"background": True}}),
        ("POST", "/v1/responses", {"json": ASKED | {"previous_response_id": "resp_1"}}),
    ],
    ids=str,
)
async def test_route_without_jobs_says_how_to_start_them(
    alone: httpx.AsyncClient, method: str, path: str, fields: dict[str, Any]
) -> None:
    answer = await alone.request(method, path, **fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (501, "not_implemented_error")
    assert error["code"] == "no_jobs"
    assert "services.jobs" in error["message"]
    assert "--jobs HOST:PORT" in error["message"]


@pytest.fixture(scope="module")
async def alone(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a shim without a jobs service."""
    async with running_shim("--tokenizer", stack.tokenizer) as shim, client_of(shim.url) as http:
        yield http


async def test_shim_without_jobs_serves_everything_else(alone: httpx.AsyncClient) -> None:
    assert (await alone.get("/ready")).json() == {"status": "ready"}
    answer = await alone.post("/v1/responses", json=ASKED)
    assert (answer.status_code, answer.json()["store"]) == (200, False)

    async def ask(data: bytes, media_type: str) -> httpx.Response:
        source = {"type": "base64", "media_type": media_type, "data": encoded(data)}
        content = [{"type": "document", "source": source}, {"type": "text", "text": "Sum up."}]
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        return await alone.post("/v1/messages", json=body)

    assert (await ask(b"plain", "text/plain")).status_code == 200
    refused = await ask(pdf("Hello"), "application/pdf")
    assert refused.status_code == 501
    assert "--jobs HOST:PORT" in refused.json()["error"]["message"]


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_batch_whose_jobs_are_killed_answers_every_line_once(
    stack: Stack, tmp_path: Path
) -> None:
    [port] = free_ports(1)
    flags = ("--tokenizer", stack.tokenizer, "--port", str(port), "--file-folder", str(tmp_path))
    async with (
        running_shim("--tokenizer", stack.tokenizer, "--jobs", f"127.0.0.1:{port}") as shim,
        client_of(shim.url) as http,
    ):
        async with running_jobs(*flags) as jobs:
            batch = await started(http, lines(80, max_tokens=200, ignore_eos=True))
            path = f"/v1/batches/{batch}"
            await some_answered(http, path)
            jobs.process.kill()
            await jobs.process.wait()
        lost = await http.get(path)
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "jobs_unavailable")
        assert int(lost.headers["retry-after"]) >= 1
        assert (await http.get("/ready")).json() == {"status": "ready", "faults": ["jobs"]}
        async with running_jobs(*flags):
            await until_reached(http)
            done = await ended(http, path)
            assert done["request_counts"] == {"total": 80, "completed": 80, "failed": 0}
            content = (await http.get(f"/v1/files/{done['output_file_id']}/content")).text
    answered = [json.loads(line)["custom_id"] for line in content.splitlines()]
    assert sorted(answered, key=int) == [str(number) for number in range(80)]


async def some_answered(http: httpx.AsyncClient, path: str) -> None:
    async with asyncio.timeout(HANG_SECONDS):
        counted = 0
        while not counted:
            await asyncio.sleep(0.1)  # the API has no event
            counted = (await http.get(path)).json()["request_counts"]["completed"]


async def until_reached(http: httpx.AsyncClient) -> None:
    """Wait until the shim reaches the jobs, as /ready says."""
    async with asyncio.timeout(HANG_SECONDS):
        while "faults" in (await http.get("/ready")).json():  # noqa: ASYNC110 - it has no event
            await asyncio.sleep(0.1)


async def test_response_in_the_background_outlives_the_shim_that_took_it(stack: Stack) -> None:
    served = ("--tokenizer", stack.tokenizer)
    async with running_jobs(*served) as jobs:
        async with (
            running_shim(*served, "--jobs", jobs.target) as shim,
            client_of(shim.url) as http,
        ):
            body = LONG | {"stream": True, "max_output_tokens": 500}
            async with http.stream("POST", "/v1/responses", json=body) as stream:
                events = stream.aiter_lines()
                first = [await anext(events) for _ in range(2)]
                identity = json.loads(first[1].removeprefix("data: "))["response"]["id"]
                shim.process.kill()
                await shim.process.wait()
        async with (
            running_shim(*served, "--jobs", jobs.target) as shim,
            client_of(shim.url) as http,
        ):
            path = f"/v1/responses/{identity}"
            done = await ended(http, path)
            assert done["status"] in ("completed", "incomplete")
            replayed = (await http.get(f"{path}?stream=true")).text
            assert replayed.startswith("\n".join(first))
            last = json.loads(replayed.strip().rpartition("data: ")[2])
            assert last["response"] == done


async def test_stream_ends_with_an_error_when_its_shim_stops(stack: Stack) -> None:
    served = ("--tokenizer", stack.tokenizer)
    async with (
        running_jobs(*served) as jobs,
        running_shim(*served, "--jobs", jobs.target, "--grace", "0.1") as shim,
        client_of(shim.url) as http,
        http.stream("POST", "/v1/responses", json=LONG | {"stream": True}) as stream,
    ):
        lines = stream.aiter_lines()
        await anext(lines)
        shim.process.terminate()
        *_, kind, data = [line async for line in lines if line]
        assert kind == "event: error"
        assert json.loads(data.removeprefix("data: "))["code"] == "stopping"


async def test_form_without_its_end_is_no_file(stack: Stack) -> None:
    """Otherwise a part of a file would be kept as if it were whole."""
    served = ("--tokenizer", stack.tokenizer)
    form = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nhalf of it'
    )
    async with (
        running_jobs(*served) as jobs,
        running_shim(*served, "--jobs", jobs.target) as shim,
        client_of(shim.url) as http,
    ):
        headers = {"content-type": "multipart/form-data; boundary=x"}
        refused = await http.post("/v1/files", content=form, headers=headers)
        assert refused.status_code == 400, refused.text
        kept = await http.post("/v1/files", content=form + b"\r\n--x--\r\n", headers=headers)
        assert kept.json()["bytes"] == len("half of it")
        assert [each["id"] for each in (await http.get("/v1/files")).json()["data"]] == [
            kept.json()["id"]
        ]


async def test_limit_of_bodies_counts_no_images_in_the_background_either(stack: Stack) -> None:
    served = ("--tokenizer", stack.tokenizer)
    url = f"data:image/png;base64,{base64.b64encode(bytes(7_500_000)).decode()}"
    content = [{"type": "input_image", "image_url": url}, {"type": "input_text", "text": "x"}]
    body = {"input": [{"role": "user", "content": content}], "background": True}
    async with (
        running_jobs(*served) as jobs,
        running_shim(*served, "--jobs", jobs.target) as shim,
        client_of(shim.url) as http,
    ):
        refused = await http.post("/v1/responses", json=body)
        assert refused.status_code == 400, refused.text
        assert "takes text alone" in refused.json()["error"]["message"]


class Caller:
    """A client of the jobs by gRPC, perhaps with a key."""

    def __init__(self, target: str, key: str = "") -> None:
        self.channel = connect(target, token=(lambda: key) if key else None)
        self.files = FileServiceStub(self.channel)
        self.batches = BatchServiceStub(self.channel)
        self.responses = ResponseServiceStub(self.channel)

    async def upload(self, content: bytes, purpose: str = "batch") -> jobs_pb2.File:
        messages = [
            jobs_pb2.UploadFileRequest(name="in.jsonl", purpose=purpose),
            *(jobs_pb2.UploadFileRequest(piece=bytes([byte])) for byte in content[:3]),
            jobs_pb2.UploadFileRequest(piece=content[3:]),
        ]
        return (await self.files.UploadFile(iter(messages))).file

    async def content(self, file_id: str) -> bytes:
        call = self.files.DownloadFile(jobs_pb2.DownloadFileRequest(file_id=file_id))
        return b"".join([answer.piece async for answer in call])


async def refusal(call: Any) -> ServiceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return ServiceError.from_rpc_error(caught.value)


@pytest.fixture(scope="module")
async def two(
    stack: Stack, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[list[Caller]]:
    """Two callers with keys of their own."""
    folder = tmp_path_factory.mktemp("keys")
    keys, token = folder / "keys.json", folder / "token"
    keys.write_text(json.dumps({"tiers": {"default": {}}}))
    token.write_text("t" * 32)
    secrets = [add_key(keys, "default") for _ in range(2)]
    flags = ("--keys", str(keys), "--peer-token-file", str(token))
    async with running_jobs("--tokenizer", stack.tokenizer, *flags) as jobs:
        callers = [Caller(jobs.target, secret) for secret in secrets]
        yield callers
        for each in callers:
            await each.channel.close()


async def test_batch_runs_by_grpc_alone(two: list[Caller]) -> None:
    caller = two[0]
    file = await caller.upload(lines(2))
    assert (file.bytes, file.purpose) == (len(lines(2)), "batch")
    request = jobs_pb2.CreateBatchRequest(
        input_file_id=file.id, endpoint="/v1/completions", metadata={"for": "test"}
    )
    batch = (await caller.batches.CreateBatch(request)).batch
    async with asyncio.timeout(HANG_SECONDS):
        while not batch.HasField("ended_at"):
            await asyncio.sleep(0.1)  # the contract has no event
            asked = jobs_pb2.GetBatchRequest(batch_id=batch.id)
            batch = (await caller.batches.GetBatch(asked)).batch
    assert batch.status == jobs_pb2.BATCH_STATUS_COMPLETED
    assert (batch.total, batch.completed, batch.failed) == (2, 2, 0)
    assert dict(batch.metadata) == {"for": "test"}
    output = (await caller.content(batch.output_file_id)).splitlines()
    assert {json.loads(line)["custom_id"] for line in output} == {"0", "1"}


async def test_owner_reads_nothing_of_another_by_grpc(two: list[Caller]) -> None:
    owner, other = two
    file = await owner.upload(lines(1))
    body = json.dumps(ASKED | {"background": True}).encode()
    response = await owner.responses.StartResponse(jobs_pb2.StartResponseRequest(body_json=body))
    identity = response.response_id
    calls = [
        other.files.GetFile(jobs_pb2.GetFileRequest(file_id=file.id)),
        other.content(file.id),
        other.files.DeleteFile(jobs_pb2.DeleteFileRequest(file_id=file.id)),
        other.files.ReadText(
            jobs_pb2.ReadTextRequest(documents=[jobs_pb2.Document(file_id=file.id)])
        ),
        other.batches.CreateBatch(
            jobs_pb2.CreateBatchRequest(input_file_id=file.id, endpoint="/v1/completions")
        ),
        other.responses.GetResponse(jobs_pb2.GetResponseRequest(response_id=identity)),
        other.responses.CancelResponse(jobs_pb2.CancelResponseRequest(response_id=identity)),
        other.responses.DeleteResponse(jobs_pb2.DeleteResponseRequest(response_id=identity)),
        other.responses.ListInputItems(jobs_pb2.ListInputItemsRequest(response_id=identity)),
    ]
    for call in calls:
        assert (await refusal(call)).code is grpc.StatusCode.NOT_FOUND
    assert not (await other.files.ListFiles(jobs_pb2.ListFilesRequest())).files
    assert (await owner.files.ListFiles(jobs_pb2.ListFilesRequest())).files


async def test_holder_of_a_key_acts_for_nobody_else(two: list[Caller]) -> None:
    caller = two[0]
    for fields in ({"account": "key_1"}, {"tenant": "x"}, {"priority": 1}, {"may_schedule": True}):
        context = jobs_pb2.RequestContext(**fields)
        request = jobs_pb2.ListFilesRequest(context=context)
        error = await refusal(caller.files.ListFiles(request))
        assert error.code is grpc.StatusCode.PERMISSION_DENIED
        assert error.field == f"context.{next(iter(fields))}"
    put = jobs_pb2.PutResponseRequest(response=jobs_pb2.StoredResponse(id="resp_1"))
    assert (await refusal(caller.responses.PutResponse(put))).reason == "NOT_A_SERVICE"


async def test_response_in_the_background_is_watched_and_cancelled_by_grpc(
    two: list[Caller],
) -> None:
    caller = two[1]
    body = json.dumps(LONG | {"foreign": 1}).encode()
    request = jobs_pb2.StartResponseRequest(body_json=body, keep_events=True)
    begun = await caller.responses.StartResponse(request)
    assert json.loads(begun.response_json)["status"] == "queued"
    assert [*begun.ignored] == ["foreign"]
    watched = jobs_pb2.WatchResponseRequest(response_id=begun.response_id)
    seen: list[jobs_pb2.ResponseEvent] = []
    async for answer in caller.responses.WatchResponse(watched):
        seen += answer.events
        if len(seen) > 5:
            break
    cancelled = await caller.responses.CancelResponse(
        jobs_pb2.CancelResponseRequest(response_id=begun.response_id)
    )
    watched.starting_after = seen[-1].number
    async for answer in caller.responses.WatchResponse(watched):
        seen += answer.events
    assert [event.number for event in seen] == [*range(len(seen))]
    assert seen[-1].type == "response.cancelled"
    assert json.loads(cancelled.response_json)["status"] == "cancelled"
    asked = jobs_pb2.GetResponseRequest(response_id=begun.response_id)
    assert (await caller.responses.GetResponse(asked)).response_json == cancelled.response_json


async def test_wrong_requests_are_refused_with_their_field(two: list[Caller]) -> None:
    caller = two[0]

    async def field_of(call: Any) -> str:
        error = await refusal(call)
        assert error.code is grpc.StatusCode.INVALID_ARGUMENT
        return error.field

    start = jobs_pb2.StartResponseRequest
    batch = jobs_pb2.CreateBatchRequest(input_file_id="x", endpoint="/v1/models")
    many = jobs_pb2.CreateBatchRequest(
        input_file_id="x", endpoint="/v1/completions", metadata={str(i): "" for i in range(17)}
    )
    after = jobs_pb2.ListFilesRequest(page=jobs_pb2.Page(after="nothing"))
    cold = json.dumps(ASKED | {"background": True, "temperature": 9}).encode()
    for call, field in (
        (caller.upload(b"abcd", purpose="other"), "purpose"),
        (caller.batches.CreateBatch(batch), "endpoint"),
        (caller.batches.CreateBatch(many), "metadata"),
        (caller.files.ListFiles(after), "after"),
        (caller.responses.StartResponse(start(body_json=b"[")), "body_json"),
        (caller.responses.StartResponse(start(body_json=b"{}")), "background"),
        (caller.responses.StartResponse(start(body_json=cold)), "temperature"),
    ):
        assert await field_of(call) == field


async def test_file_that_is_too_large_is_refused_by_grpc(stack: Stack) -> None:
    async with shim_with_jobs(stack.tokenizer, "--max-file-bytes", "100") as (_, jobs):
        caller = Caller(jobs.target)
        assert (await refusal(caller.upload(bytes(101)))).reason == "FILE_TOO_LARGE"
        assert (await caller.upload(bytes(100))).bytes == 100
        assert len((await caller.files.ListFiles(jobs_pb2.ListFilesRequest())).files) == 1
        await caller.channel.close()


async def test_silent_stream_of_events_has_signs_of_life(stack: Stack) -> None:
    """A proxy would close it else."""
    async with shim_with_jobs(stack.tokenizer, "--heartbeat-seconds", "0.001") as (_, jobs):
        caller = Caller(jobs.target)
        body = json.dumps(LONG | {"max_output_tokens": 200}).encode()
        request = jobs_pb2.StartResponseRequest(body_json=body, keep_events=True)
        begun = await caller.responses.StartResponse(request)
        watched = jobs_pb2.WatchResponseRequest(response_id=begun.response_id)
        sizes = [len(answer.events) async for answer in caller.responses.WatchResponse(watched)]
        assert sizes.count(0) > 1  # more than the first one
        assert sum(sizes) > 2
        await caller.channel.close()
