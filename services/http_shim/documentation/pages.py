"""Pages for browsers: the playground (GET /) and the API reference (GET /docs).

The pages need no key, but the playground's requests do. The pages load nothing from other servers;
the content-security-policy header enforces that.
"""

from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.http_shim.documentation.openapi import document
from services.http_shim.documentation.reference import reference

__all__ = ["PAGES", "page_routes"]

_WEB = Path(__file__).parent / "web"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}
_FILES = {
    "/": ("text/html", (_WEB / "playground.html").read_bytes()),
    "/docs": ("text/html", reference(document())),
    "/playground.js": ("text/javascript", (_WEB / "playground.js").read_bytes()),
    "/style.css": ("text/css", (_WEB / "style.css").read_bytes()),
}
PAGES = frozenset(_FILES)
"""Paths of the pages and their files"""


def page_routes() -> list[Route]:
    """Return a route for each file."""
    return [Route(path, _page(*file)) for path, file in _FILES.items()]


def _page(media_type: str, content: bytes) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return page
