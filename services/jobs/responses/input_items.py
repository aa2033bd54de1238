"""Items of a kept response's input, in pages."""

import hashlib
from typing import Any

import msgspec

from services.jobs.store.file_store import Page
from services.jobs.store.response_store import StoredResponse
from tokenwire.errors import invalid

__all__ = ["page_of_items"]


def page_of_items(stored: StoredResponse, page: Page) -> tuple[list[dict[str, Any]], bool]:
    """Return a page of the items, each with an id, and whether more follow.

    Raises INVALID_ARGUMENT for a `page.after` that is not in the list.
    """
    items: list[dict[str, Any]] = []
    known: set[object] = set()
    for index, item in enumerate(msgspec.json.decode(stored.input)):
        own = item.get("id")
        if not isinstance(own, str) or own in known:  # clients page by the ids
            own = _item_id(stored.id, index)
        known.add(own)
        items.append({"id": own} | item | {"id": own})
    if not page.is_ascending:
        items.reverse()
    if page.after is not None:
        places = [index for index, item in enumerate(items) if item["id"] == page.after]
        if not places:
            raise invalid("after", "after is no id of an item of this response.")
        items = items[places[0] + 1 :]
    return items[: page.limit], len(items) > page.limit


def _item_id(response_id: str, index: int) -> str:
    digest = hashlib.blake2b(f"{response_id}:{index}".encode(), digest_size=16)
    return f"item_{digest.hexdigest()}"
