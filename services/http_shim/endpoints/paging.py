"""Pages of lists, as in OpenAI's API: `limit`, `after` and `order`."""

from starlette.datastructures import QueryParams

from services.http_shim.stored.file_store import Page
from tokenwire.errors import invalid

__all__ = ["page_of"]

_USUAL, _MOST = 20, 100
_DIGITS = 9


def page_of(query: QueryParams, most: int = _MOST) -> Page:
    """Return the page that a query asks for, of at most `most` items. Raises INVALID_ARGUMENT."""
    limit = query.get("limit", str(_USUAL)).lstrip("0")
    if not limit.isascii() or not limit.isdigit():
        raise invalid("limit", "limit must be a whole number of at least 1.")
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise invalid("order", "order must be asc or desc.")
    return Page(min(int(limit[:_DIGITS]), most), query.get("after"), is_ascending=order == "asc")
