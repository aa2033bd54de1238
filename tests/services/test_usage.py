"""Usage by key over HTTP, gRPC, batches and the background, and budgets of keys."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.common.accounts.key_file import add_key, key_id
from tests.services.shim import Shim, assert_documented, running_jobs, running_shim
from tests.stack import Stack, free_ports, served_stack
from tokenwire.client import Client, EngineClient
from tokenwire.errors import ServiceError

PROMPT = "def add(a, b):\n    return a +"
BODY = {"prompt": PROMPT, "max_tokens": 5, "ignore_eos": True}
TIERS = {"default": {}, "small": {"monthly_tokens": 100}}
HANG_SECONDS = 120
FIRST_DAY = time.strftime("%Y-%m-%d", time.gmtime())


@dataclass(frozen=True)
class Metered:
    """A stack with keys."""

    stack: Stack
    secrets: dict[str, str]
    """Keys by the name of their owner"""

    def http(self, name: str) -> httpx.AsyncClient:
        return client_of(self.stack.url, self.secrets[name])


def client_of(url: str, secret: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.AsyncClient(base_url=url, timeout=60, headers=headers)


@pytest.fixture(scope="module")
def metered(embedded_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Metered]:
    folder = tmp_path_factory.mktemp("metered")
    keys, logs = folder / "keys.json", folder / "logs"
    logs.mkdir()
    keys.write_text(json.dumps({"tiers": TIERS}))
    names = ("http", "grpc", "tokens", "batch", "background", "many", "poor")
    secrets = {name: add_key(keys, "default", name) for name in names}
    secrets["limited"] = add_key(keys, "default", "limited", monthly_tokens=100)
    secrets["ops"] = add_key(keys, "default", "ops", admin=True)
    with served_stack(embedded_model, logs, "--keys", str(keys)) as stack:
        yield Metered(stack, secrets)


async def usage(http: httpx.AsyncClient, **parameters: str) -> list[dict[str, Any]]:
    """Return the results since the tests began, which may be on two days, each group added up."""
    answer = await http.get("/v1/usage", params={"start": FIRST_DAY} | parameters)
    assert answer.status_code == 200, answer.text
    groups: dict[tuple[object, ...], dict[str, Any]] = {}
    for bucket in answer.json()["data"]:
        for result in bucket["results"]:
            counts = {name: value for name, value in result.items() if isinstance(value, int)}
            group = groups.setdefault(
                tuple(value for name, value in result.items() if name not in counts),
                result | dict.fromkeys(counts, 0),
            )
            for name, count in counts.items():
                group[name] += count
    return list(groups.values())


async def counted(http: httpx.AsyncClient, requests: int, **parameters: str) -> dict[str, Any]:
    """Return the usage once it has so many requests, which another process reports."""
    async with asyncio.timeout(HANG_SECONDS):
        while True:
            found = await usage(http, **parameters)
            if found and found[0]["num_model_requests"] >= requests:
                return found[0]
            await asyncio.sleep(0.1)


async def test_usage_over_http_is_what_the_answers_said(metered: Metered) -> None:
    async with metered.http("http") as http:
        whole = (await http.post("/v1/completions", json=BODY)).json()["usage"]
        again = (await http.post("/v1/completions", json=BODY)).json()["usage"]
        streamed = await http.post("/v1/completions", json=BODY | {"stream": True})
        assert streamed.text.rstrip().endswith("[DONE]")
        refused = await http.post("/v1/completions", json=BODY | {"temperature": 99})
        assert refused.status_code == 400
        by_model = await usage(http, group_by="day,model,key")
    failed, served = sorted(by_model, key=lambda result: result["model"])
    assert (failed["model"], failed["num_failed_requests"], failed["input_tokens"]) == ("", 1, 0)
    assert served["model"] == metered.stack.model_id
    assert served["num_model_requests"] == 3
    assert served["input_tokens"] == 3 * whole["prompt_tokens"]
    assert served["output_tokens"] == 15
    cached = again["prompt_tokens_details"]["cached_tokens"]
    assert served["input_cached_tokens"] >= cached
    assert (served["api_key_id"], served["api_key_name"]) == (
        key_id(metered.secrets["http"]), "http"
    )  # fmt: skip


async def test_request_to_several_models_counts_for_each(metered: Metered) -> None:
    async with metered.http("many") as http:
        body = {"model": [metered.stack.model_id] * 2, "prompt": "x", "max_tokens": 3}
        assert (await http.post("/v1/completion", json=body)).status_code == 200
        [result] = await usage(http)
    assert result["num_model_requests"] == 2


async def test_grpc_clients_of_text_and_of_tokens_count_once(metered: Metered) -> None:
    async with Client(metered.stack.tokenizer, key=metered.secrets["grpc"]) as client:
        answer = await client.generate(PROMPT, max_tokens=4, ignore_eos=True)
    async with EngineClient(metered.stack.engine, key=metered.secrets["tokens"]) as engine:
        await engine.generate([5, 6, 7], max_tokens=6, ignore_eos=True)
    for name, tokens in (("grpc", answer.usage.prompt_tokens + 4), ("tokens", 9)):
        async with metered.http(name) as http:
            result = await counted(http, 1)
        assert result["num_model_requests"] == 1
        assert result["input_tokens"] + result["output_tokens"] == tokens


async def test_exhausted_budget_over_grpc_has_a_reason_and_asks_for_no_retry(
    metered: Metered,
) -> None:
    async with Client(metered.stack.tokenizer, key=metered.secrets["limited"]) as client:
        await client.generate(PROMPT, max_tokens=4, ignore_eos=True)
        with pytest.raises(ServiceError) as caught:
            await client.generate(PROMPT, max_tokens=1_000)
    assert caught.value.reason == "INSUFFICIENT_QUOTA"
    assert caught.value.retry_seconds is None
    async with EngineClient(metered.stack.engine, key=metered.secrets["limited"]) as engine:
        with pytest.raises(ServiceError, match="has limits"):
            await engine.generate([5, 6, 7], max_tokens=6)


async def test_batches_and_background_responses_count_for_their_key(metered: Metered) -> None:
    async with metered.http("batch") as http:
        lines = [
            json.dumps({"custom_id": str(number), "url": "/v1/completions", "body": BODY})
            for number in range(3)
        ]
        files = {"file": ("in.jsonl", "\n".join(lines).encode())}
        file = await http.post("/v1/files", files=files, data={"purpose": "batch"})
        body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions"}
        assert (await http.post("/v1/batches", json=body)).status_code == 200
        result = await counted(http, 3)
        assert (result["num_model_requests"], result["output_tokens"]) == (3, 15)
    async with metered.http("background") as http:
        body = {"input": "def f():", "max_output_tokens": 4, "background": True}
        assert (await http.post("/v1/responses", json=body)).status_code == 200
        result = await counted(http, 1)
        assert result["num_model_requests"] == 1, "the shim that forwards it counts nothing"


async def test_only_an_admin_key_sees_other_keys(metered: Metered) -> None:
    async with metered.http("poor") as http:
        await http.post("/v1/completions", json=BODY)
        assert (await usage(http, key="poor"))[0]["num_model_requests"] == 1
        refused = await http.get("/v1/usage", params={"key": "ops"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (
            403, "admin_key_required"
        )  # fmt: skip
    async with metered.http("ops") as http:
        [result] = await usage(http, key="poor", group_by="day,key")
        assert result["api_key_name"] == "poor"
        names = {each["api_key_name"] for each in await usage(http, group_by="day,key")}
    assert "poor" in names


async def test_operator_lists_keys_with_their_usage_and_without_their_secrets(
    metered: Metered,
) -> None:
    async with metered.http("ops") as http:
        listed = await http.get("/v1/keys")
    assert_documented(listed.json(), "KeyList")
    by_name = {key["name"]: key for key in listed.json()["data"]}
    assert by_name["limited"]["monthly_tokens"] == 100
    assert by_name["poor"]["month_requests"] == 1
    assert by_name["poor"]["last_used_at"] <= time.time()
    assert (by_name["ops"]["admin"], by_name["poor"]["admin"]) == (True, False)
    assert not any(secret in listed.text for secret in metered.secrets.values())
    async with metered.http("poor") as http:
        assert (await http.get("/v1/keys")).status_code == 403


def test_command_prints_usage_as_a_table_and_as_json(metered: Metered, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(metered.secrets["ops"])
    command = [
        *(sys.executable, "-m", "tokenwire", "usage", "--url", metered.stack.url),
        *("--key-file", str(key), "--by", "day,key,model", "--of", "poor"),
    ]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    titles, row = table.splitlines()
    assert titles.split() == [
        "day", "key", "model", "requests", "failed", "input", "cached", "output"
    ]  # fmt: skip
    day, *rest = row.split()
    assert day >= FIRST_DAY
    assert rest[:3] == ["poor", metered.stack.model_id, "1"]
    printed = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    buckets = json.loads(printed.stdout)["data"]
    names = [result["api_key_name"] for bucket in buckets for result in bucket["results"]]
    assert names == ["poor"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--by", "day,end"), "--by has day, model and key, not 'end'."),
        (("--start", "x"), "--start must be a date such as 2026-01-31, or Unix seconds."),
        (("--start", "2026-02-02", "--end", "2026-02-01"), "--end must be after --start."),
    ],
)
def test_command_names_the_flag_that_the_server_refuses(
    metered: Metered, tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    """Its user knows no parameters of the HTTP API."""
    key = tmp_path / "own.key"
    key.write_text(metered.secrets["ops"])
    command = [sys.executable, "-m", "tokenwire", "usage", "--url", metered.stack.url]
    command += ["--key-file", str(key), *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (1, f"tokenwire: {sentence}\n")


async def test_openai_sdk_reads_the_usage_with_an_admin_key(metered: Metered) -> None:
    url = f"{metered.stack.url}/v1"
    async with openai.AsyncOpenAI(base_url=url, admin_api_key=metered.secrets["ops"]) as sdk:
        page = await sdk.admin.organization.usage.completions(
            start_time=int(time.time()) - 3600, group_by=["model", "api_key_id"], limit=2
        )
    results = [result.to_dict() for bucket in page.data for result in bucket.results]
    assert {result["object"] for result in results} == {"organization.usage.completions.result"}
    assert key_id(metered.secrets["poor"]) in {result["api_key_id"] for result in results}


@pytest.mark.parametrize(
    "query",
    ["start=yesterday", "start=2026-02-30", "end=1970-01-01", "group_by=hour", "limit=0",
     "limit=9999", "limit=0000000019999", "start=1795910400000", "page=%00", "page=WzEsIiJd",
     "bucket_width=1h", "end=99999999999999999999",
     # [0, "no place"], and [0, "[99999999999999999999,\"\",\"\"]"]
     "page=WzAsICJubyBwbGFjZSJd&start=1970-01-01",
     "page=WzAsICJbOTk5OTk5OTk5OTk5OTk5OTk5OTksXCJcIixcIlwiXSJd&start=1970-01-01"],
)  # fmt: skip
async def test_wrong_query_is_a_400_that_names_the_parameter(metered: Metered, query: str) -> None:
    async with metered.http("ops") as http:
        answer = await http.get(f"/v1/usage?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


async def test_pages_of_days_join_to_the_whole(metered: Metered) -> None:
    async with metered.http("ops") as http:
        whole = (await http.get("/v1/usage")).json()
        parts: list[dict[str, Any]] = []
        page: dict[str, Any] = {"next_page": None}
        while True:
            marks = {"page": page["next_page"]} if page["next_page"] else {}
            page = (await http.get("/v1/usage", params={"limit": "9"} | marks)).json()
            parts += page["data"]
            if not page["has_more"]:
                break
    assert [part["start_time"] for part in parts] == [
        bucket["start_time"] for bucket in whole["data"]
    ]


@dataclass(frozen=True)
class Pair:
    """Two shims with one jobs service, which runs while the test says so."""

    shims: tuple[Shim, Shim]
    jobs: tuple[str, ...]
    """Flags of the jobs service"""
    secret: str
    """Key with a budget of 100 tokens"""


@pytest.fixture
async def pair(stack: Stack, tmp_path: Path) -> AsyncIterator[Pair]:
    keys, token = tmp_path / "keys.json", tmp_path / "token"
    keys.write_text(json.dumps({"tiers": TIERS}))
    token.write_text("t" * 32)
    secret = add_key(keys, "small")
    known = ("--tokenizer", stack.tokenizer, "--keys", str(keys), "--peer-token-file", str(token))
    [port] = free_ports(1)
    with_jobs = (*known, "--jobs", f"127.0.0.1:{port}")
    store = ("--usage-store", str(tmp_path / "usage.sqlite"))
    async with running_shim(*with_jobs) as one, running_shim(*with_jobs) as other:
        yield Pair((one, other), ("--port", str(port), *known, *store), secret)


async def test_budget_and_usage_survive_a_restart_of_the_jobs_service(pair: Pair) -> None:
    one, other = (client_of(shim.url, pair.secret) for shim in pair.shims)
    async with one, other:
        async with running_jobs(*pair.jobs):
            await one.post("/v1/completions", json=BODY | {"max_tokens": 60})
            before = await usage(one)
        async with running_jobs(*pair.jobs):
            assert await counted(other, 1) == before[0]
            refused = await other.post("/v1/completions", json=BODY | {"max_tokens": 60})
            assert refused.status_code == 429


async def test_budget_holds_over_two_shims(pair: Pair) -> None:
    one, other = (client_of(shim.url, pair.secret) for shim in pair.shims)
    async with one, other, running_jobs(*pair.jobs):
        first = await one.post("/v1/completions", json=BODY | {"max_tokens": 60})
        assert int(first.headers["x-ratelimit-limit-month-tokens"]) == 100
        used = first.json()["usage"]["total_tokens"]
        await usage(one)  # reports it
        refused = await other.post("/v1/completions", json=BODY | {"max_tokens": 60})
        error = refused.json()["error"]
        assert (refused.status_code, error["code"]) == (429, "insufficient_quota")
        assert f"has {100 - used} left" in error["message"]
        assert "retry-after" not in refused.headers
        reset = refused.headers["x-ratelimit-reset-month-tokens"]
        assert reset.endswith("-01T00:00:00Z")
        assert reset[:10] in error["message"]
        assert (await other.post("/v1/completions", json=BODY)).status_code == 200


async def test_sdk_does_not_retry_an_exhausted_budget(pair: Pair) -> None:
    shim = pair.shims[0]
    sdk = openai.AsyncOpenAI(base_url=f"{shim.url}/v1", api_key=pair.secret)
    async with sdk, running_jobs(*pair.jobs), client_of(shim.url, pair.secret) as http:
        await sdk.completions.create(model="default", prompt="x", max_tokens=2)
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk.completions.create(model="default", prompt="x", max_tokens=1_000)
        assert caught.value.code == "insufficient_quota"
        [result] = await usage(http)
        metrics = (await http.get("/metrics")).text
    assert result["num_model_requests"] == 1
    refusals = [line for line in metrics.splitlines() if 'status="429"' in line]
    assert [line.rpartition(" ")[2] for line in refusals if "_total{" in line] == ["1.0"]


async def test_batch_of_a_key_without_budget_fails_its_lines_at_once(pair: Pair) -> None:
    """Lines that wait for a next month would keep the batch running until it expires."""
    async with running_jobs(*pair.jobs), client_of(pair.shims[0].url, pair.secret) as http:
        await http.post("/v1/completions", json=BODY)
        line = {"custom_id": "a", "url": "/v1/completions", "body": BODY | {"max_tokens": 900}}
        files = {"file": ("in.jsonl", json.dumps(line).encode())}
        file = await http.post("/v1/files", files=files, data={"purpose": "batch"})
        body = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions"}
        batch = (await http.post("/v1/batches", json=body)).json()["id"]
        async with asyncio.timeout(HANG_SECONDS):
            while True:
                state = (await http.get(f"/v1/batches/{batch}")).json()
                if state["status"] == "completed":
                    break
                await asyncio.sleep(0.1)
        assert state["request_counts"]["failed"] == 1
        failed = (await http.get(f"/v1/files/{state['error_file_id']}/content")).text
    assert '"insufficient_quota"' in failed
