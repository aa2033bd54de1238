"""Usage that a process counts, and budgets, with a real store of usage behind them."""

import asyncio
import time
from collections.abc import Iterator

import grpc
import pytest

from services.common.accounts.account import Account
from services.common.accounts.key_file import Tier
from services.common.accounts.key_metrics import KeyMetrics
from services.common.accounts.ledger import UsageLedger
from services.common.accounts.metering import begin
from services.common.accounts.usage import RequestUsage, day_of, first_day, month_of
from services.jobs.store.usage_store import UsageQuery, UsageStore
from tokenwire.errors import ServiceError
from tokenwire.pb.jobs.v1 import jobs_pb2


class Line:
    """Connection to a store, whose answers may be lost on the way."""

    def __init__(self, store: UsageStore) -> None:
        self.store = store
        self.is_up = True
        self.loses_answers = False
        self.reports = 0

    async def report(self, request: jobs_pb2.RecordUsageRequest) -> jobs_pb2.RecordUsageResponse:
        lost = ServiceError(grpc.StatusCode.UNAVAILABLE, "UNREACHABLE", "The line is cut.")
        if not self.is_up:
            raise lost
        self.reports += 1
        sent = jobs_pb2.RecordUsageRequest.FromString(request.SerializeToString())
        answer = self.store.record(sent)
        if self.loses_answers:
            raise lost
        return answer


@pytest.fixture
def line() -> Iterator[Line]:
    store = UsageStore("", 400)
    yield Line(store)
    store.close()


def ledger_on(line: Line) -> UsageLedger:
    ledger = UsageLedger()
    ledger.report = line.report
    return ledger


def account(ledger: UsageLedger, monthly_tokens: int | None = None, key: str = "k") -> Account:
    made = Account(key, "", Tier(), time.monotonic(), ledger=ledger)
    made.budget.limit = monthly_tokens
    return made


def stored(line: Line) -> list[tuple[str, str, int, int, int]]:
    """Return key, model, requests, input and output tokens of each row."""
    today = day_of(time.time())
    found = line.store.find(UsageQuery(today, today, None, by_key=True, by_model=True))
    return [
        (place.key, place.model, total.requests, total.input_tokens, total.output_tokens)
        for place, total in found
    ]


async def test_usage_of_many_requests_is_one_row_for_each_key_and_model(line: Line) -> None:
    ledger = ledger_on(line)
    one, other = account(ledger, key="one"), account(ledger, key="other")
    for user, model, tokens in ((one, "m", 1), (one, "m", 2), (one, "n", 3), (other, "m", 4)):
        ledger.record(user, RequestUsage(model, tokens, 10))
    await ledger.flush()
    assert stored(line) == [
        ("one", "m", 2, 3, 20),
        ("one", "n", 1, 3, 10),
        ("other", "m", 1, 4, 10),
    ]
    assert line.reports == 1


async def test_report_whose_answer_was_lost_counts_once(line: Line) -> None:
    """The client of a key would else pay twice for one request."""
    ledger = ledger_on(line)
    line.loses_answers = True
    ledger.record(account(ledger), RequestUsage("m", 5, 5))
    for _ in range(3):
        await ledger.flush()
    ledger.record(account(ledger), RequestUsage("m", 1, 1))
    line.loses_answers = False
    await ledger.flush()
    assert line.reports == 5
    assert stored(line) == [("k", "m", 2, 6, 6)]


async def test_usage_waits_while_the_jobs_service_is_away(line: Line) -> None:
    ledger = ledger_on(line)
    line.is_up = False
    for _ in range(1_500):
        ledger.record(account(ledger), RequestUsage("m", 1))
    await ledger.flush()
    assert stored(line) == []
    line.is_up = True
    await ledger.flush()
    assert stored(line) == [("k", "m", 1_500, 1_500, 0)]


async def test_more_sums_than_fit_into_a_report_all_arrive(line: Line) -> None:
    ledger = ledger_on(line)
    for number in range(2_500):
        ledger.record(account(ledger, key=f"k{number}"), RequestUsage("m", 1))
    await ledger.flush()
    today = day_of(time.time())
    [(_, total)] = line.store.find(UsageQuery(today, today, None))
    assert (line.reports, total.requests) == (3, 2_500)


async def refused(user: Account, tokens: int) -> str:
    with pytest.raises(ServiceError) as caught:
        await begin(user, tokens, 1)
    error = caught.value
    assert (error.code, error.reason) == (
        grpc.StatusCode.RESOURCE_EXHAUSTED, "INSUFFICIENT_QUOTA"
    )  # fmt: skip
    assert error.retry_seconds is None, "a client would wait for weeks"
    return error.message


async def test_running_requests_do_not_exceed_a_budget_together(line: Line) -> None:
    ledger = ledger_on(line)
    user = account(ledger, 100)
    first = await begin(user, 60, 1)
    assert "has 40 left" in await refused(user, 41)
    second = await begin(user, 40, 1)
    assert "is used up" in await refused(user, 1)
    for charge, used in ((first, 10), (second, 40)):
        ledger.record(user, RequestUsage("m", used))
        charge.end(used)
    assert "has 50 left" in await refused(user, 51)
    await ledger.flush()
    assert "has 50 left" in await refused(user, 51)
    await begin(user, 50, 1)


async def test_request_that_another_limit_refuses_holds_nothing_of_the_budget() -> None:
    user = Account("k", "", Tier(concurrent_streams=1), time.monotonic())
    user.budget.limit = 10
    charge = await begin(user, 5, 1)
    with pytest.raises(ServiceError, match="in progress"):
        await begin(user, 5, 1)
    charge.end(0)
    await begin(user, 10, 1)


async def test_budget_holds_over_processes_and_restarts(line: Line) -> None:
    one, other = ledger_on(line), ledger_on(line)
    mine, yours = account(one, 100), account(other, 100)
    await begin(yours, 0, 1)  # learns the total
    one.record(mine, RequestUsage("m", 90))
    await one.flush()
    other.record(yours, RequestUsage("m", 4))
    await other.flush()  # its answer has the total of both
    assert "has 6 left" in await refused(yours, 7)
    again = ledger_on(line)
    assert "has 6 left" in await refused(account(again, 100), 7)


async def test_last_known_total_holds_while_the_jobs_service_is_away(line: Line) -> None:
    ledger = ledger_on(line)
    user = account(ledger, 100)
    await begin(user, 0, 1)
    ledger.record(user, RequestUsage("m", 30))
    await ledger.flush()
    line.is_up = False
    ledger.record(user, RequestUsage("m", 30))
    await ledger.flush()
    assert "has 40 left" in await refused(user, 41)


async def test_request_waits_for_a_silent_jobs_service_for_a_second_at_most() -> None:
    ledger, silence = UsageLedger(), asyncio.Event()

    async def hang(_: jobs_pb2.RecordUsageRequest) -> jobs_pb2.RecordUsageResponse:
        await silence.wait()
        return jobs_pb2.RecordUsageResponse()

    ledger.report = hang
    async with asyncio.timeout(30):
        await begin(account(ledger, 100), 100, 1)
    silence.set()


def test_month_ends_with_its_last_day_in_utc() -> None:
    for year, month in ((1999, 12), (2024, 2), (2026, 11)):
        number = year * 12 + month - 1
        assert month_of(first_day(number)) == number
        assert month_of(first_day(number) - 1) == number - 1


async def test_metrics_have_few_names(capsys: pytest.CaptureFixture[str]) -> None:
    """A label without a bound would fill the memory of whoever scrapes it."""
    from prometheus_client import REGISTRY

    ledger = UsageLedger()
    ledger.metrics = KeyMetrics(2)
    for number in range(5):
        ledger.record(account(ledger, key=f"bounded{number}"), RequestUsage("m", 1, 2))

    def count(name: str) -> float | None:
        return REGISTRY.get_sample_value(
            "tokenwire_key_tokens_total", {"key": name, "kind": "output"}
        )

    assert [count(f"bounded{number}") for number in range(3)] == [2, 2, None]
    assert count("other") == 6
