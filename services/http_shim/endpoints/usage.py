"""Endpoint GET /v1/usage: tokens and requests by day, model and key, as OpenAI's usage API."""

import base64
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime

import msgspec
from msgspec import Struct
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from services.common.accounts.keyring import Keyring
from services.common.accounts.ledger import UsageLedger
from services.common.accounts.usage import DAY_SECONDS, LAST_DAY, day_of
from services.http_shim.http.access import is_admin, require_admin
from services.http_shim.http.body import json_response
from services.http_shim.http.exchange import exchange_of
from services.http_shim.jobs.jobs import context_of
from services.http_shim.jobs.jobs_client import JobsClient
from tokenwire.errors import ServiceError, invalid
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["UsageBucket", "UsageEndpoint", "UsagePage", "UsageResult"]

_USUAL_DAYS, _MOST_DAYS = 31, 366
"""Days of a page"""
_MOST_RESULTS = 5_000
"""Results of a page"""
_MOST_DIGITS = 12
"""Digits of a Unix time; milliseconds have more"""
_GROUPS = {"day": "day", "model": "model", "key": "key", "api_key_id": "key"}
_UNKNOWN_PAGE = "page must be next_page of an answer."


class UsageResult(Struct):
    """Usage of a bucket; null where the usage is not divided."""

    object: str
    input_tokens: int
    input_cached_tokens: int
    """Input tokens that were in a prefix cache"""
    output_tokens: int
    num_model_requests: int
    num_failed_requests: int
    """Requests among them that ended with an error"""
    last_used: int
    """End of the last request, in Unix seconds"""
    model: str | None = None
    """Empty = the requests failed before a model took them"""
    api_key_id: str | None = None
    api_key_name: str | None = None


class UsageBucket(Struct):
    """Usage from `start_time` to before `end_time`, in Unix seconds."""

    object: str
    start_time: int
    end_time: int
    results: list[UsageResult]


class UsagePage(Struct):
    """Buckets in the order of time."""

    object: str
    data: list[UsageBucket]
    has_more: bool
    next_page: str | None


class _Cursor(Struct, array_like=True):
    """Start of a page."""

    day: int
    after: str = ""
    """`next` of the jobs service; empty = the first result of the day"""


@dataclass(frozen=True, slots=True)
class _Asked:
    """A query, in days since 1970-01-01."""

    first: int
    last: int
    """Last day, included"""
    by_day: bool
    by_key: bool
    by_model: bool
    days: int
    """Most days of the page"""
    cursor: _Cursor

    @property
    def page_last(self) -> int:
        """Last day of the page."""
        return min(self.last, self.cursor.day + self.days - 1) if self.by_day else self.last


class UsageEndpoint:
    """The endpoint, for the usage of the key itself, and for admin keys of all."""

    def __init__(self, jobs: JobsClient, keyring: Keyring | None, ledger: UsageLedger) -> None:
        self._jobs = jobs
        self._keyring = keyring
        self._ledger = ledger

    async def find(self, request: Request) -> Response:
        """Return usage by day, model and key."""
        asked = _asked(request.query_params)
        message = self._message(request, asked)
        await self._ledger.flush()  # so that a client sees its own last request
        usages: list[jobs_pb2.Usage] = []
        while True:
            try:
                answer = await self._jobs.usage(message)
            except ServiceError as error:
                if error.field == "after":
                    raise invalid("page", _UNKNOWN_PAGE) from None
                raise
            usages += answer.usages
            message.after = answer.next
            if not answer.next or len(usages) >= _MOST_RESULTS:
                break
        following = _following(asked, usages, message.after)
        buckets = [*self._buckets(asked, usages, bool(message.after))]
        page = None if following is None else _written(following)
        return json_response(UsagePage("page", buckets, page is not None, page))

    def _message(self, request: Request, asked: _Asked) -> jobs_pb2.GetUsageRequest:
        """Return the request to the jobs service. Raises PERMISSION_DENIED."""
        query, scope = request.query_params, request.scope
        exchange = exchange_of(scope)
        keys = self._ids(_texts(query, "key", "api_key_ids"))
        own = "" if exchange.account is None else exchange.account.id
        if any(key != own for key in keys):
            require_admin(scope, "The usage of other keys")
        return jobs_pb2.GetUsageRequest(
            context=context_of(exchange),
            all_keys=bool(keys) or is_admin(scope),
            keys=keys,
            models=_texts(query, "model", "models"),
            first_day=asked.cursor.day if asked.by_day else asked.first,
            last_day=asked.page_last,
            by_day=asked.by_day,
            by_key=asked.by_key,
            by_model=asked.by_model,
            after=asked.cursor.after,
        )

    def _ids(self, names: Sequence[str]) -> list[str]:
        """Return the ids of keys that are named by id or by name."""
        keys = () if self._keyring is None else self._keyring.keys
        ids: list[str] = []
        for name in names:
            ids += [key.id for key in keys if name in (key.id, key.name)] or [name]
        return ids

    def _buckets(
        self, asked: _Asked, usages: Sequence[jobs_pb2.Usage], is_cut: bool
    ) -> Iterator[UsageBucket]:
        if not asked.by_day:
            results = [self._result(asked, usage) for usage in usages]
            yield _bucket(asked.first, asked.last, results)
            return
        by_day: dict[int, list[UsageResult]] = {}
        for usage in usages:
            by_day.setdefault(usage.day, []).append(self._result(asked, usage))
        last = usages[-1].day if is_cut else asked.page_last
        for day in range(asked.cursor.day, last + 1):
            yield _bucket(day, day, by_day.get(day, []))

    def _result(self, asked: _Asked, usage: jobs_pb2.Usage) -> UsageResult:
        result = UsageResult(
            "organization.usage.completions.result",
            input_tokens=usage.input_tokens,
            input_cached_tokens=usage.cached_tokens,
            output_tokens=usage.output_tokens,
            num_model_requests=usage.requests,
            num_failed_requests=usage.errors,
            last_used=usage.last_used,
        )
        if asked.by_model:
            result.model = usage.model
        if asked.by_key:
            result.api_key_id = usage.key
            keyring = self._keyring
            result.api_key_name = "" if keyring is None else keyring.name_of(usage.key)
        return result


def _asked(query: QueryParams) -> _Asked:
    """Return what a query asks for. Raises INVALID_ARGUMENT."""
    today = day_of(time.time())
    first = _day(query, ("start", "start_time"), today - _USUAL_DAYS + 1, is_end=False)
    end = _day(query, ("end", "end_time"), today + 1, is_end=True)
    if end <= first:
        raise invalid("end", "end must be after start.")
    groups = {_group(name) for text in _texts(query, "group_by") for name in text.split(",")}
    is_openai = "start_time" in query
    if (width := query.get("bucket_width", "1d")) != "1d":
        raise invalid("bucket_width", f"bucket_width must be 1d, got {width}.")
    days = _number(query.get("limit", str(_USUAL_DAYS)))
    asked = _Asked(
        first,
        end - 1,
        by_day="day" in groups or is_openai or not groups,
        by_key="key" in groups,
        by_model="model" in groups,
        days=days,
        cursor=_Cursor(first),
    )
    return replace(asked, cursor=_cursor(query.get("page"), asked))


def _group(name: str) -> str:
    try:
        return _GROUPS[name.strip()]
    except KeyError:
        raise invalid("group_by", f"group_by has day, model and key, not {name!r}.") from None


def _texts(query: QueryParams, *names: str) -> list[str]:
    """Return the values of parameters, which SDKs also write with brackets."""
    return [text for name in names for form in (name, f"{name}[]") for text in query.getlist(form)]


def _number(text: str) -> int:
    days = int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else 0
    if not 1 <= days <= _MOST_DAYS:
        raise invalid("limit", f"limit must be a number of days from 1 to {_MOST_DAYS}.")
    return days


def _day(query: QueryParams, names: Sequence[str], usual: int, *, is_end: bool) -> int:
    """Return the day of a date or a Unix time; a time within the last day includes it."""
    name = next((name for name in names if name in query), None)
    if name is None:
        return usual
    text = query[name]
    try:
        if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS:
            day = day_of(int(text) + (DAY_SECONDS - 1 if is_end else 0))
        else:
            start = datetime.combine(date.fromisoformat(text), datetime.min.time(), UTC)
            day = day_of(start.timestamp())
    except ValueError:
        raise invalid(name, f"{name} must be a date such as 2026-01-31, or Unix seconds.") from None
    if not 0 <= day <= LAST_DAY:
        raise invalid(name, f"{name} must be from 1970 to 9999.")
    return day


def _cursor(page: str | None, asked: _Asked) -> _Cursor:
    if page is None:
        return asked.cursor
    try:
        cursor = msgspec.json.decode(base64.urlsafe_b64decode(page), type=_Cursor)
    except ValueError:
        raise invalid("page", _UNKNOWN_PAGE) from None
    if not asked.first <= cursor.day <= asked.last:
        raise invalid("page", _UNKNOWN_PAGE)
    return cursor


def _written(cursor: _Cursor) -> str:
    return base64.urlsafe_b64encode(msgspec.json.encode(cursor)).decode()


def _following(asked: _Asked, usages: Sequence[jobs_pb2.Usage], after: str) -> _Cursor | None:
    """Return the start of the next page; None = this is the last one."""
    if after:
        return _Cursor(usages[-1].day if asked.by_day else asked.first, after)
    if asked.page_last < asked.last:
        return _Cursor(asked.page_last + 1)
    return None


def _bucket(first: int, last: int, results: list[UsageResult]) -> UsageBucket:
    return UsageBucket("bucket", first * DAY_SECONDS, (last + 1) * DAY_SECONDS, results)
