"""Limits of API keys in Redis: they hold over shims and gRPC, and outlive its losses."""

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.common.accounts.key_file import add_key, key_id, revoke_key
from tests.redis_server import RedisServer, needs_redis, redis_server
from tests.services.shim import Shim, running_shim
from tests.stack import Stack, running_service
from tokenwire.client import Client
from tokenwire.errors import ServiceError

pytestmark = needs_redis

PROMPT = "def add(a, b):\n    return a +"
TIERS = {
    "default": {},
    "few": {"requests_per_minute": 2},
    "poor": {"tokens_per_minute": 60},
    "single": {"concurrent_streams": 1},
}
LONG = {
    "prompt": PROMPT, "max_tokens": 1_900, "ignore_eos": True, "stream": True, "seed": 1,
    "logprobs": 5, "return_token_ids": True,
}  # fmt: skip
"""A stream that goes on until it is read: its events exceed what lies between its ends"""


@dataclass(frozen=True)
class Pair:
    """Two shims that share limits."""

    redis: RedisServer
    shims: tuple[Shim, Shim]
    keys: Path
    flags: tuple[str, ...]

    async def clients(self, tier: str) -> tuple[httpx.AsyncClient, httpx.AsyncClient]:
        """Return a client of each shim with the same new key."""
        before = [shim.count("keys reloaded") for shim in self.shims]
        secret = add_key(self.keys, tier)
        for shim, count in zip(self.shims, before, strict=True):
            await shim.logged("keys reloaded", count + 1)
        one, other = (client_of(shim, secret) for shim in self.shims)
        return one, other


def client_of(shim: Shim, secret: str) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {secret}"}
    transport = httpx.AsyncHTTPTransport(
        socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)]
    )
    return httpx.AsyncClient(base_url=shim.url, timeout=60, headers=headers, transport=transport)


async def complete(http: httpx.AsyncClient, **fields: object) -> httpx.Response:
    body: dict[str, Any] = {"prompt": PROMPT, "ignore_eos": True, "max_tokens": 1}
    return await http.post("/v1/completions", json=body | fields)


async def shared(http: httpx.AsyncClient) -> bool:
    """Return whether a shim counts in Redis, by its metric."""
    return "tokenwire_shared_limits 1.0" in (await http.get("/metrics")).text


async def until_shared(pair: Pair, *, is_shared: bool) -> None:
    for shim in pair.shims:
        async with httpx.AsyncClient(base_url=shim.url, timeout=60) as http:
            while await shared(http) is not is_shared:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.05)


async def until(status: int, http: httpx.AsyncClient, **fields: object) -> None:
    """Send requests until one has this status."""
    while (await complete(http, **fields)).status_code != status:  # noqa: ASYNC110
        await asyncio.sleep(0.1)


@pytest.fixture(scope="module")
async def pair(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    keys = tmp_path_factory.mktemp("shared") / "keys.json"
    keys.write_text(json.dumps({"tiers": TIERS}))
    async with redis_server() as redis:
        limits = ("--keys", str(keys), "--limits-url", redis.url)
        flags = ("--tokenizer", stack.tokenizer, "--stall-seconds", "600", *limits)
        async with running_shim(*flags) as one, running_shim(*flags) as other:
            yield Pair(redis, (one, other), keys, flags)


async def test_requests_per_minute_hold_over_both_shims(pair: Pair) -> None:
    one, other = await pair.clients("few")
    async with one, other:
        first, second = await complete(one), await complete(other)
        assert (first.status_code, second.status_code) == (200, 200)
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert second.headers["x-ratelimit-remaining-requests"] == "0"
        for http in (one, other):
            refused = await complete(http)
            assert refused.status_code == 429
            assert "2 requests per minute is used up" in refused.json()["error"]["message"]
            assert 1 <= int(refused.headers["retry-after"]) <= 30


async def test_tokens_per_minute_hold_over_both_shims(pair: Pair) -> None:
    one, other = await pair.clients("poor")
    async with one, other:
        assert (await complete(one, max_tokens=40)).status_code == 200
        refused = await complete(other, max_tokens=40)
        assert refused.status_code == 429
        assert "60 tokens per minute" in refused.json()["error"]["message"]
        for http in (one, other):  # a refusal by the model gives its reservation back
            await until(400, http, max_tokens=3, temperature=-1)


async def test_concurrent_streams_hold_over_both_shims(pair: Pair) -> None:
    one, other = await pair.clients("single")
    async with one, other:
        async with one.stream("POST", "/v1/completions", json=LONG) as stream:
            assert stream.status_code == 200
            refused = await complete(other)
            assert refused.status_code == 429
            assert "may have 1 choices in progress; 1 are" in refused.json()["error"]["message"]
        await until(200, other)  # the shim notices that its client left


async def test_many_at_once_get_exactly_the_limit(pair: Pair) -> None:
    one, other = await pair.clients("few")
    async with one, other:
        answers = await asyncio.gather(*(complete(http) for http in (one, other) * 10))
        assert sorted(answer.status_code for answer in answers) == [200] * 2 + [429] * 18


async def test_revoked_key_is_refused_by_both_shims(pair: Pair) -> None:
    one, other = await pair.clients("few")
    before = [shim.count("keys reloaded") for shim in pair.shims]
    revoke_key(pair.keys, key_id(one.headers["authorization"].removeprefix("Bearer ")))
    for shim, count in zip(pair.shims, before, strict=True):
        await shim.logged("keys reloaded", count + 1)
    async with one, other:
        assert {(await complete(http)).status_code for http in (one, other)} == {401}


async def test_tokenizer_service_shares_the_limits(
    pair: Pair, stack: Stack, tmp_path: Path
) -> None:
    one, _ = await pair.clients("few")
    secret = one.headers["authorization"].removeprefix("Bearer ")
    model = ("--model", str(stack.model), "--engine", stack.engine)
    limits = ("--keys", str(pair.keys), "--limits-url", pair.redis.url)
    async with (
        running_service("tokenizer", *model, *limits, log=tmp_path / "log") as service,
        Client(service.target, key=secret) as client,
        one,
    ):
        assert (await complete(one)).status_code == 200
        await client.generate(PROMPT, max_tokens=1)
        with pytest.raises(ServiceError) as refused:
            await client.generate(PROMPT, max_tokens=1)
        assert refused.value.reason == "RATE_LIMIT_EXCEEDED"
        assert (await complete(one)).status_code == 429


async def test_streams_of_a_killed_shim_are_free_after_a_while(pair: Pair) -> None:
    secret = add_key(pair.keys, "single")
    mortal = running_shim(*pair.flags)
    shim = await mortal.__aenter__()
    survivor = client_of(pair.shims[0], secret)
    async with client_of(shim, secret) as http, survivor:
        await until(200, survivor)
        async with http.stream("POST", "/v1/completions", json=LONG) as stream:
            assert stream.status_code == 200
            assert (await complete(survivor)).status_code == 429
            shim.process.send_signal(signal.SIGKILL)
            await shim.process.wait()
            assert (await complete(survivor)).status_code == 429
            await until(200, survivor)
    await mortal.__aexit__(None, None, None)


async def test_lost_redis_leaves_each_shim_its_own_limits_until_it_is_back(pair: Pair) -> None:
    one, other = await pair.clients("few")
    single, same = await pair.clients("single")
    async with one, other, single, same:
        assert (await complete(one)).status_code == 200
        async with single.stream("POST", "/v1/completions", json=LONG) as stream:
            assert stream.status_code == 200
            await pair.redis.kill()
            assert (await complete(other)).status_code == 200
            await until_shared(pair, is_shared=False)
            await pair.shims[1].logged("Redis is away")
            assert (await complete(single)).status_code == 429  # its own stream counts
            assert (await complete(same)).status_code == 200  # the other's does not
            statuses = [(await complete(other)).status_code for _ in range(3)]
            assert statuses[-1] == 429
            await pair.redis.start()
            await until_shared(pair, is_shared=True)
            assert (await complete(same)).status_code == 429  # running streams are known again
        fresh, again = await pair.clients("few")
        async with fresh, again:
            assert [(await complete(http)).status_code for http in (fresh, again)] == [200, 200]
            assert (await complete(fresh)).status_code == 429


async def test_redis_that_answers_nothing_holds_no_request_up(pair: Pair) -> None:
    one, other = await pair.clients("few")
    async with one, other:
        pair.redis.pause()
        try:
            assert (await complete(one)).status_code == 200
            assert not await shared(one)
        finally:
            pair.redis.resume()
        await until_shared(pair, is_shared=True)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--limits-url", "redis://127.0.0.1:1"), "--limits-url needs --keys"),
        (("--keys", "{keys}", "--limits-url", "http://127.0.0.1"), "is no URL of Redis"),
    ],
)
async def test_unusable_url_ends_the_shim_with_a_sentence(
    pair: Pair, flags: tuple[str, ...], sentence: str
) -> None:
    given = [flag.format(keys=pair.keys) for flag in flags]
    with pytest.raises(AssertionError, match=sentence):
        async with running_shim(*given):
            pass


async def test_shim_starts_without_redis(pair: Pair, stack: Stack) -> None:
    secret = add_key(pair.keys, "few")
    nowhere = ("--keys", str(pair.keys), "--limits-url", "redis://127.0.0.1:9")
    async with (
        running_shim("--tokenizer", stack.tokenizer, *nowhere) as shim,
        client_of(shim, secret) as http,
    ):
        assert [(await complete(http)).status_code for _ in range(3)] == [200, 200, 429]
