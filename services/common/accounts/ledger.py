"""Ledger of a process: the usage that it counts, reports and knows of each API key.

A request adds to a sum in memory. A task reports the sums to the jobs service, in batches with
increasing numbers; a batch is repeated with its number until its answer has come, so the service
counts it once. The answer has the month's totals of the keys that have a budget.
"""

import asyncio
import logging
import time
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import grpc
from prometheus_client import Counter, Gauge

from services.common.accounts.key_metrics import KeyMetrics
from services.common.accounts.usage import RequestUsage, UsageKey, UsageSum, day_of, month_of
from tokenwire.errors import ServiceError
from tokenwire.pb.jobs.v1 import jobs_pb2

if TYPE_CHECKING:
    from services.common.accounts.account import Account

__all__ = ["MOST_USAGES", "Report", "UsageLedger"]

Report: TypeAlias = Callable[[jobs_pb2.RecordUsageRequest], Awaitable[jobs_pb2.RecordUsageResponse]]
_LOG = logging.getLogger("usage")
_UNREPORTED = Gauge(
    "tokenwire_unreported_usage_sums", "Sums of usage that wait to be reported to the jobs service."
)
_DROPPED = Counter(
    "tokenwire_dropped_usage_requests",
    "Requests whose usage was dropped: too many sums wait while the jobs service is away.",
)
MOST_USAGES = 1_000
"""Most sums, and most keys, of a report"""
_MOST_SUMS = 100_000
"""Most sums that wait; a sum has about 300 bytes"""
_REPORT_SECONDS = 2.0
_FRESH_SECONDS = 10.0
"""Age from which a total is asked for again before a request is admitted"""
_PATIENCE_SECONDS = 1.0
"""Longest time that a request waits for a total"""
_AWAY_SECONDS = 5.0
"""Time after a failed report in which no request waits for a total"""
_CLOSE_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class _Total:
    """Tokens of a key in a month, as the jobs service had them."""

    month: int
    tokens: int
    time: float
    """Time of the answer on the monotonic clock"""


class UsageLedger:
    """Usage of all keys that this process serves. Create it on the event loop that uses it."""

    def __init__(self) -> None:
        self.report: Report | None = None
        """Sends a report to the jobs service, and raises ServiceError or AioRpcError; None = the
        process counts alone, from its start"""
        self.metrics = KeyMetrics(0)
        self._reporter = uuid.uuid4().hex
        self._sums: dict[UsageKey, UsageSum] = {}
        """Sums that no report has yet"""
        self._batch: jobs_pb2.RecordUsageRequest | None = None
        """Report without an answer"""
        self._sequence = 0
        self._own: defaultdict[tuple[int, str], int] = defaultdict(int)
        """Tokens by month and key that no total includes"""
        self._totals: dict[str, _Total] = {}
        self._asked: set[str] = set()
        """Keys whose totals the next report asks for"""
        self._refreshing: set[asyncio.Task[None]] = set()
        self._wanted = asyncio.Event()
        self._sending = asyncio.Lock()
        self._away_until = 0.0
        self._is_away = False
        self._day = self._month = 0

    def record(self, account: "Account | None", usage: RequestUsage) -> None:
        """Count a request that has ended. account: None = the server has no keys."""
        now = time.time()
        key = "" if account is None else account.id
        self.metrics.count(account, usage)
        if (day := day_of(now)) != self._day:
            self._begin_day(day)
        self._own[self._month, key] += usage.tokens
        if self.report is None:
            return
        place = UsageKey(day, key, usage.model)
        found = self._sums.get(place)
        if found is None:
            if len(self._sums) >= _MOST_SUMS:
                _DROPPED.inc()
                return
            found = self._sums[place] = UsageSum()
        found.add(usage, now)
        if key in self._totals:
            self._asked.add(key)
        self._wanted.set()

    def month_tokens(self, key: str) -> int:
        """Return the tokens that a key has used in this month, as far as is known."""
        if (day := day_of(time.time())) != self._day:
            self._begin_day(day)
        own, total = self._own.get((self._month, key), 0), self._totals.get(key)
        return own + (total.tokens if total is not None and total.month == self._month else 0)

    async def learn(self, key: str) -> None:
        """Ask for the total of a key, unless it is fresh; wait for a short time at most.

        While the jobs service is away, the last known total stays.
        """
        if self.report is None:
            return
        total, now = self._totals.get(key), time.monotonic()
        age = now - total.time if total is not None else _FRESH_SECONDS
        if age > _REPORT_SECONDS:
            self._asked.add(key)
            self._wanted.set()
        if age < _FRESH_SECONDS or now < self._away_until:
            return
        refreshing = asyncio.ensure_future(self._refresh(key))
        self._refreshing.add(refreshing)
        refreshing.add_done_callback(self._refreshing.discard)
        await asyncio.wait([refreshing], timeout=_PATIENCE_SECONDS)

    async def run(self) -> None:
        """Until cancelled, report what was counted."""
        while True:
            await self._wanted.wait()
            await self._send()
            await asyncio.sleep(_REPORT_SECONDS)

    async def flush(self) -> None:
        """Report what was counted so far, if the jobs service answers soon."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                while self.report is not None and (self._sums or self._batch):
                    if not await self._send():
                        break

    async def close(self) -> None:
        """Report what is left."""
        await self.flush()
        if self._sums or self._batch:
            _LOG.warning("the usage of the last requests is lost: the jobs service is away")

    async def _refresh(self, key: str) -> None:
        """Report at once, unless another report brings the total of the key meanwhile."""
        before = self._totals.get(key)
        async with self._sending:
            if self._totals.get(key) is before and time.monotonic() >= self._away_until:
                self._asked.add(key)
                await self._send_next()

    async def _send(self) -> bool:
        async with self._sending:
            return await self._send_next()

    async def _send_next(self) -> bool:
        """Send the next report, or the last one again. Return whether the service has it."""
        assert self.report is not None
        request = self._batch = self._batch or self._next_batch()
        changed = [each.key for each in request.usages if each.key in self._totals]
        del request.totals_of[:]
        request.totals_of.extend([*dict.fromkeys((*changed, *self._asked))][:MOST_USAGES])
        try:
            answer = await self.report(request)
        except (ServiceError, grpc.aio.AioRpcError) as error:
            self._note_loss(error)
            if not request.sequence:
                self._batch = None
            return False
        self._settle(request, answer)
        return True

    def _next_batch(self) -> jobs_pb2.RecordUsageRequest:
        """Return a new report, with the oldest sums that fit."""
        request = jobs_pb2.RecordUsageRequest(reporter=self._reporter)
        if self._sums:
            self._sequence += 1
            request.sequence = self._sequence
        for place in [*self._sums][:MOST_USAGES]:
            request.usages.append(self._sums.pop(place).message(place))
        return request

    def _settle(
        self, request: jobs_pb2.RecordUsageRequest, answer: jobs_pb2.RecordUsageResponse
    ) -> None:
        """Take the answer to a report."""
        now = time.monotonic()
        for usage in request.usages:
            place = (month_of(usage.day), usage.key)
            self._own[place] -= usage.input_tokens + usage.output_tokens
            if self._own[place] <= 0:
                del self._own[place]
        for total in answer.totals:
            self._totals[total.key] = _Total(answer.month, total.tokens, now)
            self._asked.discard(total.key)
        self._batch, self._away_until = None, 0.0
        if self._is_away:
            self._is_away = False
            _LOG.info("the jobs service takes usage again")
        if not (self._sums or self._asked):
            self._wanted.clear()
        _UNREPORTED.set(len(self._sums))

    def _note_loss(self, error: ServiceError | grpc.aio.AioRpcError) -> None:
        self._away_until = time.monotonic() + _AWAY_SECONDS
        _UNREPORTED.set(len(self._sums) + (len(self._batch.usages) if self._batch else 0))
        if not self._is_away:
            self._is_away = True
            why = error if isinstance(error, ServiceError) else ServiceError.from_rpc_error(error)
            _LOG.warning("the jobs service takes no usage now: %s", why.message)

    def _begin_day(self, day: int) -> None:
        """Drop the tokens of former months, unless a report still has them."""
        self._day, self._month = day, month_of(day)
        if self.report is None:
            for place in [place for place in self._own if place[0] != self._month]:
                del self._own[place]
