"""Metering of API keys: requests and tokens are counted against the limits of the key's tier."""

import asyncio
import time
from typing import TYPE_CHECKING

from services.common.accounts.account import (
    Account,
    TextRequest,
    cap_output,
    estimated_tokens,
    sequence_count,
)
from services.common.accounts.identity import Identity
from services.common.accounts.usage import RequestUsage
from tokenwire.errors import ServiceError

if TYPE_CHECKING:
    from services.common.accounts.shared_limits import Lease, SharedLimits

__all__ = ["Charge", "Meter", "begin", "charge_requests", "count_call", "count_request"]


class Charge:
    """Tokens and streams that a running request holds of its account."""

    def __init__(
        self,
        account: Account,
        choices: int,
        reserved: int,
        shared: "tuple[SharedLimits, Lease] | None" = None,
        held: int = 0,
    ) -> None:
        """shared: limits in Redis that also count the request; None = none.

        held: tokens that the request holds of the key's budget.
        """
        self.reserved = reserved
        """Tokens that the request has reserved"""
        self._account = account
        self._choices = choices
        self._shared = shared
        self._held = held

    def end(self, used_tokens: int) -> None:
        """Charge the used tokens in place of the reserved ones."""
        self._account.end(self.reserved, used_tokens, time.monotonic(), self._choices)
        if self._shared is not None:
            limits, lease = self._shared
            limits.end(self._account, lease, used_tokens)
        self._account.budget.release(self._held)


class Meter:
    """One request of a key's holder, from its arrival to its end."""

    def __init__(self, caller: Identity, request: TextRequest, model: str) -> None:
        """model: canonical id of the model that would serve the request."""
        assert caller.account is not None
        self._caller = caller
        self._account = caller.account
        self._request = request
        self._model = model
        self._charge: Charge | None = None

    @property
    def key_id(self) -> str:
        """Id of the API key."""
        return self._account.id

    async def begin(self) -> None:
        """Count the request, lower its max_tokens to the tier's, and reserve the tokens it may use.

        Raises UNAUTHENTICATED, PERMISSION_DENIED or RESOURCE_EXHAUSTED.
        """
        self._caller.require_valid()
        await count_request(self._account)
        self._account.require_model(self._model)
        cap_output(self._request, [self._account.tier.max_tokens])
        tokens, choices = estimated_tokens(self._request), sequence_count(self._request)
        beginning = asyncio.ensure_future(begin(self._account, tokens, choices))
        try:
            self._charge = await asyncio.shield(beginning)
        except asyncio.CancelledError:  # the client left: give back a later grant
            beginning.add_done_callback(_give_back)
            raise

    def end(self, usage: RequestUsage) -> None:
        """Count and charge what the request has used, unless `begin` refused it."""
        if self._charge is not None:
            self._account.ledger.record(self._account, usage)
            self._charge.end(usage.tokens)
            self._charge = None


async def count_call(caller: Identity, model: str) -> None:
    """Count a call that generates no tokens. Raises PERMISSION_DENIED or RESOURCE_EXHAUSTED."""
    if caller.account is not None:
        caller.require_valid()
        await count_request(caller.account)
        caller.account.require_model(model)


async def count_request(account: Account) -> None:
    """Count a request. Raises RESOURCE_EXHAUSTED."""
    if account.shared is None or not await account.shared.count_request(account):
        account.count_request(time.monotonic())


def charge_requests(account: Account, more: int) -> None:
    """Charge an answer as further requests, even if this leaves a debt."""
    if account.shared is None or not account.shared.charge_requests(account, more):
        account.charge_requests(more, time.monotonic())


async def begin(account: Account, tokens: int, choices: int) -> Charge:
    """Start a request that uses at most `tokens` tokens. Raises RESOURCE_EXHAUSTED."""
    held = await account.budget.hold(tokens)
    try:
        return await _begin(account, tokens, choices, held)
    except BaseException:
        account.budget.release(held)
        raise


async def _begin(account: Account, tokens: int, choices: int, held: int) -> Charge:
    limits = account.shared
    if limits is None:
        reserved = account.begin(tokens, time.monotonic(), choices)
        return Charge(account, choices, reserved, None, held)
    lease = await limits.begin(account, tokens, choices)
    if lease.is_shared:
        account.streams += choices
        return Charge(account, choices, lease.reserved, (limits, lease), held)
    try:
        reserved = account.begin(tokens, time.monotonic(), choices)
    except ServiceError:
        limits.end(account, lease, 0)
        raise
    return Charge(account, choices, reserved, (limits, lease), held)


def _give_back(beginning: "asyncio.Future[Charge]") -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        beginning.result().end(0)
