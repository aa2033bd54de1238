"""Store of usage: sums, pages, restarts, and what is dropped."""

import time
from pathlib import Path

import pytest

from services.common.accounts.usage import day_of
from services.common.faults import faulty_parts
from services.jobs.store.usage_store import UsageQuery, UsageStore
from tokenwire.errors import ServiceError
from tokenwire.pb.jobs.v1 import jobs_pb2

TODAY = day_of(time.time())


def report(
    *usages: tuple[int, str, str, int], reporter: str = "r", sequence: int = 1
) -> jobs_pb2.RecordUsageRequest:
    """Return a report of rows with a day, a key, a model and input tokens."""
    rows = [
        jobs_pb2.Usage(day=day, key=key, model=model, requests=1, input_tokens=tokens, last_used=7)
        for day, key, model, tokens in usages
    ]
    return jobs_pb2.RecordUsageRequest(reporter=reporter, sequence=sequence, usages=rows)


def totals(store: UsageStore, query: UsageQuery) -> list[tuple[int, str, str, int]]:
    return [(*place, total.input_tokens) for place, total in store.find(query)]


def test_usage_is_divided_as_asked() -> None:
    store = UsageStore("", 400)
    store.record(report((TODAY - 1, "a", "m", 1), (TODAY, "a", "m", 2), (TODAY, "b", "n", 4)))
    span = (TODAY - 1, TODAY)
    assert totals(store, UsageQuery(*span, None)) == [(0, "", "", 7)]
    assert totals(store, UsageQuery(*span, ["a"])) == [(0, "", "", 3)]
    assert totals(store, UsageQuery(*span, None, models=["n"])) == [(0, "", "", 4)]
    assert totals(store, UsageQuery(*span, ["nobody"])) == []
    assert totals(store, UsageQuery(*span, None, by_day=True)) == [
        (TODAY - 1, "", "", 1), (TODAY, "", "", 6)
    ]  # fmt: skip
    assert totals(store, UsageQuery(*span, None, by_key=True, by_model=True)) == [
        (0, "a", "m", 3), (0, "b", "n", 4)
    ]  # fmt: skip


def test_pages_hold_every_row_once() -> None:
    store = UsageStore("", 400)
    rows = [(TODAY - day, key, "m", 1) for day in range(3) for key in "abc"]
    store.record(report(*rows))
    found, after = [], None
    while True:
        query = UsageQuery(TODAY - 9, TODAY, None, by_day=True, by_key=True, after=after, limit=2)
        page = store.find(query)
        if not page:
            break
        found += page
        after = page[-1][0]
    assert len(found) == len({place for place, _ in found}) == 9


def test_report_counts_once_also_after_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "usage.sqlite")
    store = UsageStore(path, 400)
    for _ in range(2):
        store.record(report((TODAY, "a", "m", 5)))
    store.close()
    store = UsageStore(path, 400)
    store.record(report((TODAY, "a", "m", 5)))
    store.record(report((TODAY, "a", "m", 5), reporter="other"))
    answer = store.record(report((TODAY, "a", "m", 1), sequence=2))
    assert not answer.totals
    asked = jobs_pb2.RecordUsageRequest(reporter="r", totals_of=["a", "b"])
    assert [each.tokens for each in store.record(asked).totals] == [11, 0]
    store.close()


def test_days_beyond_the_limit_are_dropped() -> None:
    store = UsageStore("", 31)
    store.record(report((TODAY - 31, "a", "m", 1), (TODAY - 30, "a", "m", 2)))
    assert totals(store, UsageQuery(0, TODAY, None)) == [(0, "", "", 2)]


def test_removed_file_takes_nothing_until_it_is_put_back(tmp_path: Path) -> None:
    """Usage in a removed file is lost when the server ends."""
    path = tmp_path / "usage.sqlite"
    store = UsageStore(str(path), 400)
    path.rename(tmp_path / "elsewhere")
    with pytest.raises(ServiceError, match="was removed or replaced"):
        store.record(report((TODAY, "a", "m", 1)))
    assert faulty_parts() == ["usage"]
    (tmp_path / "elsewhere").rename(path)
    store.record(report((TODAY, "a", "m", 1)))
    assert faulty_parts() == []
    store.close()
