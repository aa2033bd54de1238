"""Endpoint GET /v1/keys: the API keys with their limits and their usage, for operators."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from services.common.accounts.key_file import Key, Tier
from services.common.accounts.keyring import Keyring
from services.common.accounts.ledger import UsageLedger
from services.common.accounts.usage import day_of, first_day, month_of, next_month
from services.http_shim.http.access import require_admin
from services.http_shim.http.body import json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.jobs.jobs import context_of
from services.http_shim.jobs.jobs_client import JobsClient
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["KeyList", "KeyObject", "Keys"]

_MOST_KEYS = 500
"""Keys of a page"""
_LIMITS = ("requests_per_minute", "tokens_per_minute", "concurrent_streams", "max_tokens", "models")


class KeyObject(Struct):
    """A key without its secret; null = no limit, or not known."""

    id: str
    object: str
    name: str
    tier: str
    admin: bool
    created_at: int
    revoked_at: int | None
    limits: dict[str, Any]
    """Limits of its tier"""
    monthly_tokens: int | None
    """Budget of a calendar month"""
    month_tokens: int | None = None
    """Tokens of this month"""
    month_requests: int | None = None
    last_used_at: int | None = None


class KeyList(Struct):
    """Keys in the order of the file."""

    object: str
    data: list[KeyObject]
    has_more: bool
    month_ends_at: int
    usage_error: str | None = None
    """Reason for which the usage is not known; null = it is known"""


class Keys:
    """The endpoint of an operator's list. Keys are made and revoked in their file."""

    def __init__(self, jobs: JobsClient, keyring: Keyring | None, ledger: UsageLedger) -> None:
        self._jobs = jobs
        self._keyring = keyring
        self._ledger = ledger

    async def all(self, request: Request) -> Response:
        """List the keys after the one with the id `after`."""
        require_admin(request.scope, "The list of keys")
        keys = [] if self._keyring is None else self._keyring.keys
        if after := request.query_params.get("after"):
            place = next((place for place, key in enumerate(keys) if key.id == after), None)
            if place is None:
                raise invalid("after", f"after must be the id of a key, not {after!r}.")
            keys = keys[place + 1 :]
        page = keys[:_MOST_KEYS]
        listing = KeyList("list", [*map(self._object, page)], len(keys) > len(page), _month_end())
        try:
            await self._add_usage(request, listing.data)
        except ServiceError as error:
            listing.usage_error = error.message
        return json_response(listing)

    def _object(self, key: Key) -> KeyObject:
        assert self._keyring is not None
        tier = self._keyring.tier_of(key)
        budget = tier.monthly_tokens if key.monthly_tokens is None else key.monthly_tokens
        return KeyObject(
            key.id,
            "key",
            key.name,
            key.tier,
            key.admin,
            key.created,
            key.revoked,
            _limits(tier),
            budget,
        )

    async def _add_usage(self, request: Request, keys: Sequence[KeyObject]) -> None:
        """Add the usage of keys. Raises ServiceError."""
        if not keys:
            return
        await self._ledger.flush()
        today = day_of(time.time())
        month = await self._usages(request, keys, first_day(month_of(today)), today)
        ever = await self._usages(request, keys, 0, today)
        for key in keys:
            used, last = month.get(key.id), ever.get(key.id)
            key.month_tokens = 0 if used is None else used.input_tokens + used.output_tokens
            key.month_requests = 0 if used is None else used.requests
            key.last_used_at = None if last is None else last.last_used

    async def _usages(
        self, request: Request, keys: Sequence[KeyObject], first: int, last: int
    ) -> Mapping[str, jobs_pb2.Usage]:
        answer = await self._jobs.usage(
            jobs_pb2.GetUsageRequest(
                context=context_of(exchange_of(request.scope)),
                all_keys=True,
                keys=[key.id for key in keys],
                first_day=first,
                last_day=last,
                by_key=True,
            )
        )
        return {usage.key: usage for usage in answer.usages}


def _limits(tier: Tier) -> dict[str, Any]:
    return {
        name: value for name, value in structs.asdict(tier).items() if name in _LIMITS and value
    }


def _month_end() -> int:
    return int(next_month().timestamp())
