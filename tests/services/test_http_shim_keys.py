"""API keys over HTTP: authentication, tiers, rate limits and revocation."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from services.common.accounts.key_file import add_key, key_id, revoke_key
from tests.services.shim import Shim, running_jobs, running_shim, shim_with_jobs
from tests.stack import Stack, is_busy, is_idle, watch_load

PROMPT = "def add(a, b):\n    return a +"
TIERS = {
    "default": {},
    "few": {"requests_per_minute": 2},
    "readers": {"requests_per_minute": 20},
    "short": {"max_tokens": 5},
    "poor": {"tokens_per_minute": 60},
    "single": {"concurrent_streams": 1},
    "rich": {"tokens_per_minute": 900},
    "elsewhere": {"models": ["other"]},
}
HELLO = {"role": "user", "content": "Hello!"}
LONG = {"prompt": PROMPT, "max_tokens": 1_900, "ignore_eos": True, "stream": True, "seed": 1}
"""A request that still runs after every wait of its test, even on a busy machine"""


def written_keys(folder: Path) -> Path:
    path = folder / "keys.json"
    path.write_text(json.dumps({"tiers": TIERS}))
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture(scope="module")
async def shim(stack: Stack, keys: Path) -> AsyncIterator[Shim]:
    catalog = keys.with_name("catalog.toml")
    catalog.write_text(f'[[models]]\nid = "m"\ntarget = "{stack.tokenizer}"')
    known = known_to_each_other(keys)
    async with (
        running_jobs("--tokenizer", stack.tokenizer, *known) as jobs,
        running_shim("--catalog", str(catalog), "--jobs", jobs.target, *known) as running,
    ):
        yield running


def known_to_each_other(keys: Path) -> tuple[str, ...]:
    """Return the flags of services with these keys and a token of their own."""
    token = keys.with_name("token")
    token.write_text("t" * 32)
    return ("--keys", str(keys), "--peer-token-file", str(token))


async def client_of(shim: Shim, keys: Path, tier: str) -> httpx.AsyncClient:
    """Return a client with a new key of this tier."""
    before = shim.count("keys reloaded")
    secret = add_key(keys, tier)
    await shim.logged("keys reloaded", before + 1)
    return httpx.AsyncClient(
        base_url=shim.url, timeout=60, headers={"authorization": f"Bearer {secret}"}
    )


async def complete(http: httpx.AsyncClient, **fields: object) -> httpx.Response:
    return await http.post("/v1/completions", json={"prompt": PROMPT, "ignore_eos": True} | fields)


async def chat(http: httpx.AsyncClient, **fields: object) -> httpx.Response:
    body = {"messages": [HELLO], "ignore_eos": True} | fields
    return await http.post("/v1/chat/completions", json=body)


async def test_key_gets_no_prefix_hits_from_other_keys(shim: Shim, keys: Path) -> None:
    prompt = "".join(f"value_{i} = {i * i}\n" for i in range(40))

    async def cached(http: httpx.AsyncClient) -> int:
        usage = (await complete(http, prompt=prompt, max_tokens=1)).json()["usage"]
        tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
        return tokens

    async with await client_of(shim, keys, "default") as one:
        assert await cached(one) == 0
        assert await cached(one) > 0
    async with await client_of(shim, keys, "default") as other:
        assert await cached(other) == 0


async def test_key_can_lower_but_not_raise_the_priority(shim: Shim, keys: Path) -> None:
    async with await client_of(shim, keys, "default") as http:
        for ask in (complete, chat):
            assert (await ask(http, max_tokens=1, priority=5)).status_code == 200
            refused = await ask(http, max_tokens=1, priority=-1)
            assert refused.status_code == 403
            assert refused.json()["error"]["param"] == "priority"


async def test_files_and_batches_belong_to_their_key(shim: Shim, keys: Path) -> None:
    """The requests of a batch run with the key's models and limits, and cost it its tokens."""
    line = {"custom_id": "1", "url": "/v1/completions", "body": {"prompt": PROMPT, "max_tokens": 3}}
    async with (
        await client_of(shim, keys, "default") as one,
        await client_of(shim, keys, "default") as other,
    ):
        form: dict[str, Any] = {"files": {"file": ("in", json.dumps(line))}}
        file = (await one.post("/v1/files", data={"purpose": "batch"}, **form)).json()["id"]
        body = {"input_file_id": file, "endpoint": "/v1/completions"}
        assert (await other.post("/v1/batches", json=body)).status_code == 404
        batch = (await one.post("/v1/batches", json=body)).json()
        for path in (f"/v1/files/{file}", f"/v1/batches/{batch['id']}"):
            assert (await other.get(path)).status_code == 404
            assert (await one.get(path)).status_code == 200
        async with asyncio.timeout(60):
            while batch["status"] == "in_progress":
                await asyncio.sleep(0.1)  # the API has no event
                batch = (await one.get(f"/v1/batches/{batch['id']}")).json()
        assert batch["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert (await other.get("/v1/files")).json()["data"] == []
        assert (await other.get("/v1/batches")).json()["data"] == []


async def test_header_of_a_tenant_shows_nothing_that_another_key_stored(
    stack: Stack, tmp_path: Path
) -> None:
    """The operator may trust x-tenant for the prefix cache; files and responses are the key's."""
    keys = written_keys(tmp_path)
    one, other = add_key(keys, "default"), add_key(keys, "default")
    known, trust = known_to_each_other(keys), ("--trust-scheduling-headers", "always")
    async with (
        shim_with_jobs(stack.tokenizer, *known, shim_flags=(*known, *trust)) as (shim, _),
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        mine = {"authorization": f"Bearer {one}", "x-tenant": "shared"}
        form: dict[str, Any] = {"data": {"purpose": "batch"}, "files": {"file": ("in", "{}")}}
        file = (await http.post("/v1/files", headers=mine, **form)).json()["id"]
        asked = {"input": "Hello", "max_output_tokens": 1}
        answered = (await http.post("/v1/responses", headers=mine, json=asked)).json()["id"]
        for tenant in ("shared", key_id(one)):
            headers = {"authorization": f"Bearer {other}", "x-tenant": tenant}
            assert (await http.get(f"/v1/files/{file}", headers=headers)).status_code == 404
            assert (await http.get("/v1/files", headers=headers)).json()["data"] == []
            body = {
                "messages": [HELLO | {"content": [{"type": "file", "file": {"file_id": file}}]}]
            }
            refused = await http.post("/v1/chat/completions", headers=headers, json=body)
            assert refused.status_code == 404
            for call in (http.get, http.delete):
                assert (await call(f"/v1/responses/{answered}", headers=headers)).status_code == 404
            refused = await http.post(
                "/v1/responses", headers=headers, json=asked | {"previous_response_id": answered}
            )
            assert refused.status_code == 404
        headers = mine | {"x-tenant": "another"}
        assert (await http.get(f"/v1/files/{file}", headers=headers)).status_code == 200
        assert (await http.get(f"/v1/responses/{answered}", headers=headers)).status_code == 200
        answer = await http.post(
            "/v1/chat/completions", headers=headers, json=body | {"max_tokens": 1}
        )
        assert answer.status_code == 200


async def test_anthropics_header_carries_a_key(shim: Shim, keys: Path) -> None:
    body = {"messages": [HELLO], "max_tokens": 1}
    async with await client_of(shim, keys, "default") as http:
        secret = http.headers.pop("authorization").removeprefix("Bearer ")
        refused = await http.post("/v1/messages", json=body)
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"
        assert refused.json()["type"] == "error"
        answer = await http.post("/v1/messages", json=body, headers={"x-api-key": secret})
        assert (answer.status_code, answer.json()["model"]) == (200, "m")


async def test_every_route_except_probes_and_pages_needs_a_key(shim: Shim) -> None:
    async with httpx.AsyncClient(base_url=shim.url, timeout=60) as http:
        for path in (
            "/health", "/ready", "/metrics", "/version", "/openapi.json",
            "/", "/docs", "/status", "/llms.txt", "/playground/main.js", "/style.css",
            "/vendor/markdown-it/markdown-it.umd.min.js",
        ):  # fmt: skip
            assert (await http.get(path)).status_code == 200
        for method, path in (
            ("POST", "/v1/completions"), ("POST", "/completions"), ("POST", "/v1/completion"),
            ("POST", "/v1/chat/completions"), ("POST", "/chat/completions"),
            ("POST", "/v1/messages"), ("POST", "/v1/messages/count_tokens"),
            ("POST", "/v1/embeddings"), ("POST", "/v1/files"), ("GET", "/v1/batches"),
            ("GET", "/v1/models"), ("GET", "/v1/models/m"), ("POST", "/tokenize"),
            ("POST", "/detokenize"), ("POST", "/apply-template"), ("GET", "/tokenizer_info"),
            ("GET", "/status.json"), ("GET", "/nowhere"),
        ):  # fmt: skip
            response = await http.request(method, path)
            assert response.status_code == 401, path
            assert response.json()["error"]["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "route"),
    [
        ("POST", "/v1/completions", "/v1/completions"),
        ("POST", "/completions", "/v1/completions"),
        ("GET", "/v1/models/m", "/v1/models/{model:path}"),
        ("GET", "/v1/chat/completions", "/v1/chat/completions"),
        ("GET", "/nowhere", "unknown"),
    ],
)
async def test_request_without_a_key_is_logged_and_counted_by_route(
    shim: Shim, method: str, path: str, route: str
) -> None:
    """Without the route, a client with a revoked key looks like a scan of paths."""
    identity = f"keyless-{method}-{path.replace('/', '-')}"
    async with httpx.AsyncClient(base_url=shim.url, timeout=60) as http:
        await http.request(method, path, headers={"x-request-id": identity})
        metrics = (await http.get("/metrics")).text
    assert (await shim.answered(identity))["route"] == route
    assert f'tokenwire_http_requests_total{{model="",route="{route}",status="401"}}' in metrics


async def test_openai_sdk_authenticates_and_the_log_names_the_key(shim: Shim, keys: Path) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"{shim.url}/v1", api_key="tw-wrong", max_retries=0
    ) as sdk:
        with pytest.raises(openai.AuthenticationError):
            await sdk.models.list()
    async with await client_of(shim, keys, "default") as http:
        key = http.headers["authorization"].removeprefix("Bearer ")
    async with openai.AsyncOpenAI(base_url=f"{shim.url}/v1", api_key=key) as sdk:
        answer = await sdk.completions.create(
            model="m", prompt="x", max_tokens=1, extra_headers={"x-request-id": "whose"}
        )
    assert answer.model == "m"
    assert (await shim.answered("whose"))["key"] == key_id(key)


async def test_requests_over_the_requests_per_minute_are_429(shim: Shim, keys: Path) -> None:
    async with await client_of(shim, keys, "few") as http:
        for left in ("1", "0"):
            response = await complete(http, max_tokens=1)
            assert response.status_code == 200
            assert response.headers["x-ratelimit-limit-requests"] == "2"
            assert response.headers["x-ratelimit-remaining-requests"] == left
        response = await http.post("/tokenize", json={"prompt": "x"})
        assert response.status_code == 429
        assert 1 <= int(response.headers["retry-after"]) <= 30
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert (await http.get("/v1/models")).status_code == 429


async def test_large_answers_count_as_several_requests(shim: Shim, keys: Path) -> None:
    """Else a key could have files sent all day that cost it no token."""
    async with await client_of(shim, keys, "readers") as http:
        fields, size = {"purpose": "user_data"}, 60 * 2**20  # a debt of minutes
        uploaded = await http.post("/v1/files", data=fields, files={"file": ("a", b"x" * size)})
        path = f"/v1/files/{uploaded.json()['id']}"
        assert len((await http.get(f"{path}/content")).content) == size
        assert (await http.get(path)).status_code == 429


async def test_slow_uploads_of_a_key_leave_room_for_another(shim: Shim, keys: Path) -> None:
    async with (
        await client_of(shim, keys, "default") as slow,
        await client_of(shim, keys, "default") as other,
    ):
        host, port = slow.base_url.host, slow.base_url.port
        connections = [await asyncio.open_connection(host, port) for _ in range(5)]
        head = (
            "POST /v1/files HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n"
            f"authorization: {slow.headers['authorization']}\r\n"
            "content-type: multipart/form-data; boundary=x\r\n\r\n"
        )
        for _, writer in connections:
            writer.write(head.encode())
        answers = [asyncio.ensure_future(reader.readline()) for reader, _ in connections]
        [refused], waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert b"429" in refused.result()
        fields, files = {"purpose": "user_data"}, {"file": ("a", b"x")}
        answer = await other.post("/v1/files", data=fields, files=files)
        assert answer.status_code == 200
        for each in waiting:
            each.cancel()
        for _, writer in connections:
            writer.close()


async def test_requests_over_the_tokens_per_minute_are_429(shim: Shim, keys: Path) -> None:
    async with await client_of(shim, keys, "poor") as http:
        first = await complete(http, max_tokens=30)
        assert first.status_code == 200
        assert int(first.headers["x-ratelimit-remaining-tokens"]) < 30
        refused = await complete(http, max_tokens=30)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert (await complete(http, max_tokens=1)).status_code == 200
        many = await http.post(
            "/v1/completion", json={"model": ["m"] * 9, "prompt": "x", "max_tokens": 5}
        )
        assert many.status_code == 429, "all its models count"


async def test_large_reservation_causes_no_token_debt(shim: Shim, keys: Path) -> None:
    """Reserved tokens are not used yet: the bucket must not become negative."""
    async with await client_of(shim, keys, "poor") as http:
        named = {"x-request-id": "much"}
        async with http.stream("POST", "/v1/completions", json=LONG, headers=named) as response:
            assert response.headers["x-ratelimit-remaining-tokens"] == "0"
            refused = await complete(http, max_tokens=1)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        await shim.answered("much")


async def charged(http: httpx.AsyncClient, since: float) -> tuple[int, float]:
    """Return a lower and an upper bound of the tokens charged to a rich key since that time."""
    response = await http.get("/v1/models")
    used = 900 - int(response.headers["x-ratelimit-remaining-tokens"])
    return used, used + (time.monotonic() - since) * 900 / 60


@pytest.mark.parametrize("streams", [False, True])
async def test_key_is_charged_for_used_tokens(shim: Shim, keys: Path, streams: bool) -> None:
    async with await client_of(shim, keys, "rich") as http:
        free = await complete(http, max_tokens=8, temperature=0)
        stop = free.json()["choices"][0]["text"][-3:]
        asked = {"max_tokens": 600, "temperature": 0, "stream": streams}
        assert (await complete(http, stop=stop, **asked)).status_code == 200
        least, _ = await charged(http, 0)
        assert least < 100
        began = time.monotonic()
        assert (await complete(http, **asked)).status_code == 200
        _, most = await charged(http, began)
        assert most >= 600


async def test_disconnected_stream_is_charged_for_sent_tokens(shim: Shim, keys: Path) -> None:
    async with await client_of(shim, keys, "rich") as http:
        began, named = time.monotonic(), {"x-request-id": "left-midway"}
        async with http.stream("POST", "/v1/completions", json=LONG, headers=named) as response:
            lines = response.aiter_lines()
            for _ in range(40):  # at least 20 tokens: every other line is empty
                await anext(lines)
        line = await shim.answered("left-midway")
        assert line["status"] == 499
        assert 20 <= line["completion_tokens"] < 1_900
        least, most = await charged(http, began)
        assert least - 1 <= line["prompt_tokens"] + line["completion_tokens"] <= most


async def test_disconnected_unstreamed_request_is_charged_for_used_tokens(
    stack: Stack, shim: Shim, keys: Path
) -> None:
    await watch_load(stack.engine, until=is_idle)
    async with await client_of(shim, keys, "rich") as http:
        body = LONG | {"stream": False}
        began, named = time.monotonic(), {"x-request-id": "left-unseen"}
        asking = asyncio.ensure_future(http.post("/v1/completions", json=body, headers=named))
        await watch_load(stack.engine, until=is_busy)
        asking.cancel()
        line = await shim.answered("left-unseen")
        assert line["status"] == 499
        assert line["completion_tokens"] > 0
        least, most = await charged(http, began)
        assert least - 1 <= line["prompt_tokens"] + line["completion_tokens"] <= most


async def test_requests_over_the_concurrent_streams_are_429(shim: Shim, keys: Path) -> None:
    async with await client_of(shim, keys, "single") as http:
        named = {"x-request-id": "the-only-one"}
        async with http.stream("POST", "/v1/completions", json=LONG, headers=named) as response:
            lines = response.aiter_lines()  # held, because its end would close the connection
            await anext(lines)
            refused = await complete(http, stream=True)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
        await shim.answered("the-only-one")
        assert (await complete(http, max_tokens=1)).status_code == 200


async def test_tier_limits_max_tokens(shim: Shim, keys: Path) -> None:
    async with await client_of(shim, keys, "short") as http:
        for fields in ({}, {"max_tokens": 100}, {"max_tokens": 100, "stop": ["@@"]}):
            usage = (await complete(http, **fields, temperature=0)).json()["usage"]
            assert usage["completion_tokens"] == 5
        many = await http.post("/v1/completion", json={"model": "m", "prompt": "x = [1, 2, 3,"})
        assert many.json()["usage"]["completion_tokens"] <= 5
        for fields in ({}, {"max_tokens": 100}):  # a chat's default is the rest of the context
            usage = (await chat(http, **fields)).json()["usage"]
            assert usage["completion_tokens"] == 5


async def test_chat_is_charged_for_used_tokens(shim: Shim, keys: Path) -> None:
    async with await client_of(shim, keys, "rich") as http:
        began, used = time.monotonic(), 0
        for streams in (False, True):
            identity = f"chat-{streams}"
            body = {"messages": [HELLO], "max_tokens": 200, "stop": ["!"], "stream": streams}
            headers = {"x-request-id": identity}
            await http.post("/v1/chat/completions", json=body, headers=headers)
            line = await shim.answered(identity)
            used += line["prompt_tokens"] + line["completion_tokens"]
        least, most = await charged(http, began)
        assert least - 1 <= used <= most


async def test_model_outside_the_tier_is_403(shim: Shim, keys: Path) -> None:
    async with await client_of(shim, keys, "elsewhere") as http:
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/completion", {"prompt": "x", "model": "m"}),
            ("/v1/chat/completions", {"messages": [HELLO]}),
            ("/tokenize", {"prompt": "x"}),
        ):
            response = await http.post(path, json=body)
            assert response.status_code == 403
            assert response.json()["error"]["code"] == "model_not_allowed"


async def test_key_for_the_only_model_needs_no_model_name(stack: Stack, tmp_path: Path) -> None:
    """The rule is the same as without keys and without a catalog."""
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"tiers": {"mine": {"models": [stack.model_id]}, **TIERS}}))
    async with running_shim("--tokenizer", stack.tokenizer, "--keys", str(keys)) as shim:
        async with await client_of(shim, keys, "mine") as http:
            for named in ({}, {"model": "default"}, {"model": stack.model_id}):
                assert (await complete(http, max_tokens=1, **named)).status_code == 200
        async with await client_of(shim, keys, "elsewhere") as http:
            assert (await complete(http, max_tokens=1)).status_code == 403


async def test_revoked_key_is_401_and_its_running_streams_finish(shim: Shim, keys: Path) -> None:
    async with (
        await client_of(shim, keys, "default") as http,
        http.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        before = shim.count("keys reloaded")
        revoke_key(keys, key_id(http.headers["authorization"].removeprefix("Bearer ")))
        await shim.logged("keys reloaded", before + 1)
        refused = await http.get("/v1/models")
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "revoked_api_key"
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_shim_with_keys_may_listen_beyond_loopback(stack: Stack, keys: Path) -> None:
    async with (
        running_shim(
            "--host", "0.0.0.0", "--keys", str(keys), "--tokenizer", stack.tokenizer
        ) as shim,
        httpx.AsyncClient(base_url=shim.url, timeout=60) as http,
    ):
        assert (await http.get("/v1/models")).status_code == 401


async def test_invalid_key_file_keeps_the_previous_keys(shim: Shim, keys: Path) -> None:
    """Runs last: it corrupts the file that the other tests use."""
    async with await client_of(shim, keys, "default") as http:
        keys.write_text("{")  # noqa: ASYNC240
        assert (await shim.logged("The previous keys stay."))["level"] == "error"
        assert (await complete(http, max_tokens=1)).status_code == 200
