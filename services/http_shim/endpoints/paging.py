"""Pages of lists, as in OpenAI's API: `limit`, `after` and `order`."""

from starlette.datastructures import QueryParams

from services.http_shim.stored.file_store import Page
from tokenwire.errors import invalid

__all__ = ["page_of"]

_USUAL, _MOST = 20, 100


def page_of(query: QueryParams) -> Page:
    """Return the page that a query asks for. Raises INVALID_ARGUMENT."""
    limit = query.get("limit", str(_USUAL))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit[:4]) <= _MOST:
        raise invalid("limit", f"limit must be a whole number from 1 to {_MOST}.")
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc.")
    return Page(int(limit[:4]), query.get("after"), is_ascending=order == "asc")
