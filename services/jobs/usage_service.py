"""The gRPC servicer of UsageService."""

from collections.abc import Sequence
from typing import Any

import grpc
import msgspec

from services.common.accounts import identity
from services.common.accounts.identity import admin_key_required
from services.common.accounts.ledger import MOST_USAGES
from services.common.accounts.usage import LAST_DAY, UsageKey
from services.jobs.creator import admit
from services.jobs.store.usage_store import UsageQuery, UsageStore
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.jobs.v1 import jobs_pb2
from tokenwire.pb.jobs.v1.jobs_pb2_grpc import UsageServiceServicer

__all__ = ["UsageServicer"]

_MOST_REPORTER = 64
_MOST_NAMES = 1_000
Context = grpc.aio.ServicerContext[Any, Any]


class UsageServicer(UsageServiceServicer):
    """The usage of a store."""

    def __init__(self, store: UsageStore) -> None:
        self._store = store

    async def RecordUsage(
        self, request: jobs_pb2.RecordUsageRequest, context: Context
    ) -> jobs_pb2.RecordUsageResponse:
        _check_report(request)
        return await self._store.record_later(request)

    async def GetUsage(
        self, request: jobs_pb2.GetUsageRequest, context: Context
    ) -> jobs_pb2.GetUsageResponse:
        own = (await admit(request.context)).account
        for name, texts in (("keys", request.keys), ("models", request.models)):
            _require_few(name, texts, _MOST_NAMES)
        limit = min(request.limit or MOST_USAGES, MOST_USAGES)
        query = UsageQuery(
            first_day=request.first_day,
            last_day=request.last_day,
            keys=_visible_keys(request, own),
            models=request.models,
            by_day=request.by_day,
            by_key=request.by_key,
            by_model=request.by_model,
            after=_place(request.after),
            limit=limit + 1,
        )
        found = await self._store.thread.run(self._store.find, query)
        answer = jobs_pb2.GetUsageResponse(
            usages=[total.message(place) for place, total in found[:limit]]
        )
        if len(found) > limit:
            answer.next = msgspec.json.encode(found[limit - 1][0]).decode()
        return answer


def _visible_keys(request: jobs_pb2.GetUsageRequest, own: str) -> Sequence[str] | None:
    """Return the keys whose usage is asked for; None = all. Raises PERMISSION_DENIED."""
    asks_others = request.all_keys or any(key != own for key in request.keys)
    if asks_others and not identity.current.get().is_admin:
        raise admin_key_required("The usage of other keys")
    if request.keys:
        return request.keys
    return None if request.all_keys else [own]


def _check_report(report: jobs_pb2.RecordUsageRequest) -> None:
    """Raise INVALID_ARGUMENT for a report that no service sends."""
    if not 1 <= len(report.reporter) <= _MOST_REPORTER:
        raise invalid("reporter", f"reporter must have 1 to {_MOST_REPORTER} characters.")
    for name, items in (("usages", report.usages), ("totals_of", report.totals_of)):
        _require_few(name, items, MOST_USAGES)


def _require_few(name: str, items: Sequence[object], most: int) -> None:
    if len(items) > most:
        raise invalid(name, f"{name} must have at most {most:,} items, got {len(items):,}.")


def _place(after: str) -> UsageKey | None:
    """Return the place that `next` of an answer names. Raises INVALID_ARGUMENT."""
    if not after:
        return None
    try:
        place = msgspec.json.decode(after.encode(), type=UsageKey)
    except ValueError:
        raise _unknown_place() from None
    if not 0 <= place.day <= LAST_DAY:  # SQLite refuses integers of more than 64 bits
        raise _unknown_place()
    return place


def _unknown_place() -> ServiceError:
    return invalid("after", "after must be `next` of an answer.")
