"""Pages of lists, as the rpcs ask for them."""

from services.jobs.store.file_store import Page
from tokenwire.pb.jobs.v1 import jobs_pb2

__all__ = ["MOST_FILES", "page_of"]

MOST_FILES = 1_000
"""Items of a page of files"""
_USUAL, _MOST = 20, 100


def page_of(asked: jobs_pb2.Page, most: int = _MOST) -> Page:
    """Return the page that a request asks for, of at most `most` items."""
    return Page(min(asked.limit or _USUAL, most), asked.after or None, asked.ascending)
