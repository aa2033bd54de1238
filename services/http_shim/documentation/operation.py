"""An operation of the API, and what operations share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from msgspec import Struct

from services.http_shim.errors import ErrorBody

__all__ = [
    "POST_ERRORS",
    "SCHEDULING",
    "Json",
    "Operation",
    "generate",
    "get",
    "post",
    "with_unversioned",
]

Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a path."""

    method: str
    path: str
    name: str
    """operationId"""
    summary: str
    body: type[Struct] | None = None
    required: Sequence[str] = ()
    """Required fields of the body"""
    answer: type[Struct] | None = None
    media: Sequence[str] = ("application/json",)
    """Media types of the answer; any but JSON is text"""
    chunk: type[Struct] | None = None
    """Data of a stream's events"""
    stream: str = "text/event-stream"
    """Media type of a stream"""
    last_event: str = "The data of each event; the last event's data is [DONE]."
    errors: Sequence[int] = ()
    """HTTP statuses of errors"""
    error: type[Struct] = ErrorBody
    """JSON of an error"""
    parameters: Sequence[Json] = ()
    example: Json | None = None
    """Example of a body"""
    form: Json | None = None
    """Fields of a form in place of a body, with their descriptions"""
    counts_tokens: bool = False
    needs_key: bool = True


SCHEDULING: Sequence[Json] = [
    {
        "name": "x-priority",
        "in": "header",
        "description": "Priority, higher first. Ignored unless the server trusts its callers.",
        "schema": {"type": "integer", "minimum": -(2**31), "maximum": 2**31 - 1, "default": 0},
    },
    {
        "name": "x-tenant",
        "in": "header",
        "description": "Tenant whose prefix cache is used. Ignored unless the server trusts its "
        "callers.",
        "schema": {"type": "string"},
    },
]
POST_ERRORS = (400, 401, 403, 404, 408, 413, 429, 431, 499, 500, 501, 503, 504)
"""HTTP statuses of the errors of requests with a body"""
post = partial(Operation, method="post", errors=POST_ERRORS)
generate = partial(post, counts_tokens=True, parameters=SCHEDULING)
get = partial(Operation, method="get")


def with_unversioned(operation: Operation) -> Sequence[Operation]:
    """Return an operation under /v1, and the same without /v1 in its path."""
    path, name = operation.path.removeprefix("/v1"), f"{operation.name}Unversioned"
    return operation, replace(operation, path=path, name=name)
