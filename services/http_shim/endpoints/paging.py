"""Pages of lists, as in OpenAI's API: `limit`, `after` and `order`."""

from starlette.datastructures import QueryParams

from tokenwire.errors import invalid
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["page_of"]

_USUAL = 20
_DIGITS = 9


def page_of(query: QueryParams) -> jobs_pb2.Page:
    """Return the page that a query asks for. Raises INVALID_ARGUMENT."""
    limit = query.get("limit", str(_USUAL)).lstrip("0")
    if not limit.isascii() or not limit.isdigit():
        raise invalid("limit", "limit must be a whole number of at least 1.")
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc.")
    after = query.get("after", "")
    return jobs_pb2.Page(limit=int(limit[:_DIGITS]), after=after, ascending=order == "asc")
