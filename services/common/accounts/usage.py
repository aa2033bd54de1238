"""Usage of an API key: what one request used, and sums of it by day, key and model."""

import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = [
    "DAY_SECONDS",
    "LAST_DAY",
    "RequestUsage",
    "UsageKey",
    "UsageSum",
    "day_of",
    "first_day",
    "month_of",
    "next_month",
]

DAY_SECONDS = 24 * 60 * 60
LAST_DAY = 2_932_896
"""9999-12-31, in days since 1970-01-01"""


@dataclass(frozen=True, slots=True)
class RequestUsage:
    """Tokens of one request, which has ended."""

    model: str
    """Canonical id of the model; empty = the request failed before a model took it"""
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the input that were in a prefix cache"""
    is_error: bool = False

    @property
    def tokens(self) -> int:
        """Tokens that count against a budget."""
        return self.input_tokens + self.output_tokens


class UsageKey(NamedTuple):
    """Day, key and model of a sum."""

    day: int
    """Day in UTC, in days since 1970-01-01"""
    key: str
    """Id of the API key; empty = the server has no keys"""
    model: str


@dataclass(slots=True)
class UsageSum:
    """Sum over requests of one day, key and model."""

    requests: int = 0
    errors: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    last_used: int = 0
    """End of the last request, in Unix seconds"""

    def add(self, usage: RequestUsage, now: float) -> None:
        """Add a request that ended at `now`, in Unix seconds."""
        self.requests += 1
        self.errors += usage.is_error
        self.input_tokens += usage.input_tokens
        self.output_tokens += usage.output_tokens
        self.cached_tokens += usage.cached_tokens
        self.last_used = int(now)

    def message(self, key: UsageKey) -> jobs_pb2.Usage:
        """Return the message of the sum."""
        return jobs_pb2.Usage(
            day=key.day,
            key=key.key,
            model=key.model,
            requests=self.requests,
            errors=self.errors,
            input_tokens=self.input_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            last_used=self.last_used,
        )


def day_of(seconds: float) -> int:
    """Return the day of a Unix time in UTC, in days since 1970-01-01."""
    return int(seconds // DAY_SECONDS)


def month_of(day: int) -> int:
    """Return the month of a day: 12 times the year, plus the month from 0."""
    date = datetime.fromtimestamp(day * DAY_SECONDS, UTC)
    return date.year * 12 + date.month - 1


def first_day(month: int) -> int:
    """Return the first day of a month, in days since 1970-01-01."""
    year, place = divmod(month, 12)
    return day_of(datetime(year, place + 1, 1, tzinfo=UTC).timestamp())


def next_month() -> datetime:
    """Return the start of the next month in UTC."""
    following = month_of(day_of(time.time())) + 1
    return datetime.fromtimestamp(first_day(following) * DAY_SECONDS, UTC)
