"""Scheduling by the headers x-priority and x-tenant, or by the key and its tier."""

import pytest
from starlette.types import Message, Receive, Scope, Send

from services.common.accounts.account import Account
from services.common.accounts.key_file import Tier
from services.http_shim.http.exchange import Exchange, exchange_of
from services.http_shim.http.scheduling import SchedulingMiddleware
from services.http_shim.settings import HttpShimSettings

ALICE = Account("q7Xk2mPd", "alice", Tier(priority=3), 0.0)


async def scheduled(
    *, trusts: bool, account: Account | None = None, **headers: str
) -> tuple[Exchange, int]:
    """Return the exchange that an endpoint sees, and the status of a refusal, else 0."""
    named = [(f"x-{name}".encode(), value.encode()) for name, value in headers.items()]
    exchange = Exchange("request", 0.0, account=account)
    scope: Scope = {"type": "http", "path": "/", "headers": named, "exchange": exchange}
    statuses = [0]

    async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
        assert exchange_of(scope) is exchange

    async def receive() -> Message:
        raise AssertionError("the middleware must not read the body")

    async def send(message: Message) -> None:
        statuses.append(message.get("status", statuses[-1]))

    await SchedulingMiddleware(endpoint, trusts_headers=trusts)(scope, receive, send)
    return exchange, statuses[-1]


async def test_headers_of_trusted_callers_apply() -> None:
    exchange, _ = await scheduled(trusts=True, account=ALICE, priority="-7", tenant="acme")
    assert (exchange.tenant, exchange.priority) == ("acme", -7)
    assert exchange.ignored_headers == []


async def test_headers_of_other_callers_are_ignored_and_reported() -> None:
    """Otherwise any key could overtake the others, or probe another tenant's prefix cache."""
    exchange, status = await scheduled(trusts=False, account=ALICE, priority="99", tenant="bob")
    assert (exchange.tenant, exchange.priority, status) == ("q7Xk2mPd", 3, 0)
    assert exchange.ignored_headers == ["x-priority", "x-tenant"]
    exchange, _ = await scheduled(trusts=False, priority="99")
    assert (exchange.tenant, exchange.priority) == ("", 0)


@pytest.mark.parametrize("text", ["high", "1.5", "", "2147483648", "-2147483649", "1" * 5_000])
async def test_priority_outside_int32_is_refused(text: str) -> None:
    assert (await scheduled(trusts=True, priority=text))[1] == 400


@pytest.mark.parametrize(
    ("flags", "trusts"),
    [
        ({}, True),
        ({"host": "0.0.0.0", "open": True}, False),
        ({"keys": "keys.json"}, False),
        ({"keys": "keys.json", "trust_scheduling_headers": "always"}, True),
        ({"trust_scheduling_headers": "never"}, False),
    ],
)
def test_only_local_callers_without_keys_are_trusted_by_default(
    flags: dict[str, object], trusts: bool
) -> None:
    assert HttpShimSettings(**flags).trusts_headers is trusts  # type: ignore[arg-type]
