"""Pages: the playground (GET /), the reference (/docs), the status (/status), and /llms.txt.

Their files are in services/http_shim/web. The pages need no key, but their requests do. The
content-security-policy header forbids them to load from other servers, to parse text as HTML, and
to send to other servers than the MCP servers that the operator names.
"""

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.http_shim.documentation.page_policy import page_policy
from services.http_shim.documentation.reference import reference

__all__ = ["PAGES", "page_routes"]

_WEB = Path(__file__).parents[1] / "web"
_MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
    ".woff2": "font/woff2",
}
_HEADERS = {
    "cache-control": "no-cache",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


def _found_files() -> Iterator[tuple[str, Path]]:
    """Yield path and place of each file that browsers load.

    A page has no suffix in its path: `status.html` and `status/index.html` are `/status`.
    """
    for file in sorted(_WEB.rglob("*")):
        if file.is_file() and file.suffix in _MEDIA_TYPES:
            path = f"/{file.relative_to(_WEB).as_posix()}"
            if file.suffix == ".html":
                path = path.removesuffix(".html").removesuffix("/index")
                path = "/" if path == "/playground" else path
            yield path, file


_FILES = dict(_found_files())
PAGES = frozenset({"/docs", *_FILES})
"""Paths of the pages and their files, a list fixed at the start"""


def page_routes(mcp_origins: Sequence[str], described: dict[str, Any]) -> list[Route]:
    """Return a route for each file, whose content is read now.

    mcp_origins: origins that the pages may send requests to, besides their own. described: OpenAPI
    document of the reference.
    """
    policy = page_policy(mcp_origins)
    pages = {path: (_MEDIA_TYPES[file.suffix], file.read_bytes()) for path, file in _FILES.items()}
    pages["/docs"] = ("text/html", reference(described))
    return [Route(path, _page(*page, policy)) for path, page in pages.items()]


def _page(media_type: str, content: bytes, policy: str) -> Callable[[Request], Awaitable[Response]]:
    # browsers keep the policy that they stored when the answer is 304: the tag changes with it
    etag = f'"{hashlib.sha256(content + policy.encode()).hexdigest()[:32]}"'
    headers = {**_HEADERS, "content-security-policy": policy, "etag": etag}

    async def page(request: Request) -> Response:
        # browsers ask each time, and get the file only if it differs from theirs
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)

    return page
