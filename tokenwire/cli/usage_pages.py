"""Pages of `GET /v1/usage`, read over HTTP."""

import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import httpcore

__all__ = ["read_usage"]

_OK = 200
_SECONDS = 30.0


async def read_usage(
    url: str,
    query: Mapping[str, str],
    headers: list[tuple[str, str]],
    tls: ssl.SSLContext | None,
) -> list[Any] | str:
    """Return the buckets of all pages, or the reason for none."""
    asked, buckets = dict(query), []
    async with httpcore.AsyncConnectionPool(tls) as pool:
        while True:
            page = await _page(pool, url, asked, headers)
            if isinstance(page, str):
                return page
            buckets += page["data"]
            if not page["has_more"]:
                return buckets
            asked["page"] = page["next_page"]


async def _page(
    pool: httpcore.AsyncConnectionPool,
    url: str,
    query: Mapping[str, str],
    headers: list[tuple[str, str]],
) -> dict[str, Any] | str:
    """Return a page of usage, or the reason for none."""
    timeouts = dict.fromkeys(("connect", "read", "write", "pool"), _SECONDS)
    try:
        reply = await pool.request(
            "GET",
            f"{url}/v1/usage?{urlencode(query)}",
            headers=headers,
            extensions={"timeout": timeouts},
        )
        answer: dict[str, Any] = json.loads(reply.content)
    except (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError) as error:
        return f"{url} does not answer: {error or type(error).__name__}."
    except ValueError:
        return f"{url} is no server of this kind: its answer is not JSON."
    if reply.status == _OK:
        return answer
    try:
        return str(answer["error"]["message"])
    except (KeyError, TypeError):
        return f"{url} answers with status {reply.status}."
