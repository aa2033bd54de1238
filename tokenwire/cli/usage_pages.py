"""Pages of `GET /v1/usage`, read over HTTP."""

import json
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

import httpcore

__all__ = ["UsageError", "read_usage"]

_OK = 200
_SECONDS = 30.0


class UsageError(Exception):
    """The usage can't be read. The message is one sentence."""

    def __init__(self, message: str, parameter: str = "") -> None:
        """parameter: that of the query which the server refuses."""
        super().__init__(message)
        self.parameter = parameter


async def read_usage(
    url: str,
    query: Mapping[str, str],
    headers: list[tuple[str, str]],
    tls: ssl.SSLContext | None,
) -> list[Any]:
    """Return the buckets of all pages. Raises UsageError."""
    asked, buckets = dict(query), []
    async with httpcore.AsyncConnectionPool(tls) as pool:
        while True:
            page = await _page(pool, url, asked, headers)
            buckets += page["data"]
            if not page["has_more"]:
                return buckets
            asked["page"] = page["next_page"]


async def _page(
    pool: httpcore.AsyncConnectionPool,
    url: str,
    query: Mapping[str, str],
    headers: list[tuple[str, str]],
) -> dict[str, Any]:
    """Return a page of usage. Raises UsageError."""
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
        raise UsageError(f"{url} does not answer: {error or type(error).__name__}.") from None
    except ValueError:
        message = f"{url} is no server of this kind: its answer is not JSON."
        raise UsageError(message) from None
    if reply.status == _OK:
        return answer
    try:
        message, parameter = answer["error"]["message"], answer["error"].get("param")
    except (AttributeError, KeyError, TypeError):
        raise UsageError(f"{url} answers with status {reply.status}.") from None
    raise UsageError(str(message), str(parameter or ""))
