"""Store of usage: a row for each day, API key and model, in memory or in a SQLite file."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.common.accounts.usage import UsageKey, UsageSum, day_of, first_day, month_of
from services.jobs.store.database_guard import DatabaseGuard, connect
from services.jobs.store.store_thread import StoreThread
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["UsageQuery", "UsageStore"]

_PART = "usage"
_REPORTER_DAYS = 30
"""Days after which a reporter that has sent nothing is removed: it repeats no report any more"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS usage (
    day INTEGER NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, errors INTEGER NOT NULL, input INTEGER NOT NULL,
    output INTEGER NOT NULL, cached INTEGER NOT NULL, last_used INTEGER NOT NULL,
    PRIMARY KEY (day, key, model)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS usage_of_key ON usage (key, day);
CREATE TABLE IF NOT EXISTS reporters (
    id TEXT PRIMARY KEY, sequence INTEGER NOT NULL, seen INTEGER NOT NULL
) WITHOUT ROWID
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (day, key, model) DO UPDATE SET
    requests = requests + excluded.requests, errors = errors + excluded.errors,
    input = input + excluded.input, output = output + excluded.output,
    cached = cached + excluded.cached, last_used = max(last_used, excluded.last_used)
"""
_SUMS = "sum(requests), sum(errors), sum(input), sum(output), sum(cached), max(last_used)"


@dataclass(frozen=True, slots=True)
class UsageQuery:
    """A selection of usage, and how it is divided."""

    first_day: int
    """First day, in days since 1970-01-01"""
    last_day: int
    """Last day, included"""
    keys: Sequence[str] | None
    """Ids of API keys; None = all"""
    models: Sequence[str] = ()
    """Models; empty = all"""
    by_day: bool = False
    by_key: bool = False
    by_model: bool = False
    after: UsageKey | None = None
    """Place of the last row that the caller has; None = the rows begin with the first"""
    limit: int = 1_000


class UsageStore:
    """Usage of all keys. Any thread may call its methods; coroutines call them through `thread`."""

    def __init__(self, path: str, days: int) -> None:
        """path: of the file; empty = memory. days: how long a day's usage is kept.

        Raises sqlite3.Error if the file can't be opened.
        """
        self.thread = StoreThread(_PART)
        self.guard = DatabaseGuard(_PART)
        self._days = days
        self._day = 0
        """Day on which old rows were removed last"""
        self._database = connect(path or ":memory:", _SCHEMA)
        self._database.execute("PRAGMA synchronous = NORMAL")
        if path:
            self.guard.guard(Path(path))

    async def record_later(
        self, report: jobs_pb2.RecordUsageRequest
    ) -> jobs_pb2.RecordUsageResponse:
        """Record a report in the store's thread. Raises StoreUnavailableError."""
        return await self.thread.run(self.record, report)

    def record(self, report: jobs_pb2.RecordUsageRequest) -> jobs_pb2.RecordUsageResponse:
        """Add a report unless it was added before; return the totals that it asks for.

        Raises StoreUnavailableError.
        """
        with self._change():
            if report.sequence and self._is_new(report.reporter, report.sequence):
                self._database.executemany(_ADD, map(_row, report.usages))
            self._drop_old()
            month = month_of(day_of(time.time()))
            totals = [self._month_total(key, month) for key in report.totals_of]
        return jobs_pb2.RecordUsageResponse(totals=totals, month=month)

    def find(self, query: UsageQuery) -> list[tuple[UsageKey, UsageSum]]:
        """Return the sums of a selection, by day, key and model. Raises StoreUnavailableError."""
        day, key, model = (
            name if divides else nothing
            for name, divides, nothing in (
                ("day", query.by_day, "0"),
                ("key", query.by_key, "''"),
                ("model", query.by_model, "''"),
            )
        )
        where = ["day BETWEEN ? AND ?"]
        parameters: list[object] = [query.first_day, query.last_day]
        for name, chosen in (("key", query.keys), ("model", query.models or None)):
            if chosen is not None:
                where.append(f"{name} IN ({', '.join('?' * len(chosen))})")
                parameters += chosen
        if query.after is not None:
            where.append(f"({day}, {key}, {model}) > (?, ?, ?)")
            parameters += query.after
        with self.guard.used():
            rows = self._database.execute(
                f"SELECT {day} AS d, {key} AS k, {model} AS m, {_SUMS} FROM usage "
                f"WHERE {' AND '.join(where)} GROUP BY d, k, m HAVING count(*) > 0 "
                "ORDER BY d, k, m LIMIT ?",
                (*parameters, query.limit),
            ).fetchall()
        return [(UsageKey(*row[:3]), UsageSum(*row[3:])) for row in rows]

    def close(self) -> None:
        self.thread.close()
        self._database.close()

    @contextmanager
    def _change(self) -> Iterator[None]:
        """Change the store as a whole, or not at all if the block raises or the process ends."""
        with self.guard.used():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise

    def _is_new(self, reporter: str, sequence: int) -> bool:
        """Note a report. Return False if it was noted before."""
        changed = self._database.execute(
            "INSERT INTO reporters VALUES (?, ?, ?) ON CONFLICT (id) DO UPDATE "
            "SET sequence = excluded.sequence, seen = excluded.seen "
            "WHERE excluded.sequence > sequence",
            (reporter, sequence, int(time.time())),
        )
        return changed.rowcount > 0

    def _month_total(self, key: str, month: int) -> jobs_pb2.MonthTotal:
        [[tokens]] = self._database.execute(
            "SELECT coalesce(sum(input + output), 0) FROM usage WHERE key = ? AND day BETWEEN ? "
            "AND ?",
            (key, first_day(month), first_day(month + 1) - 1),
        )
        return jobs_pb2.MonthTotal(key=key, tokens=tokens)

    def _drop_old(self) -> None:
        today = day_of(time.time())
        if today == self._day:
            return
        self._day = today
        self._database.execute("DELETE FROM usage WHERE day <= ?", (today - self._days,))
        self._database.execute(
            "DELETE FROM reporters WHERE seen < ?", (int(time.time()) - _REPORTER_DAYS * 86_400,)
        )


def _row(usage: jobs_pb2.Usage) -> tuple[int | str, ...]:
    return (
        *(usage.day, usage.key, usage.model, usage.requests, usage.errors),
        *(usage.input_tokens, usage.output_tokens, usage.cached_tokens, usage.last_used),
    )
