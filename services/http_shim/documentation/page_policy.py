"""Content security policy of the pages."""

import re
from collections.abc import Sequence

__all__ = ["mcp_origins_of", "page_policy"]

_FIXED = (
    "default-src 'none'; script-src 'self'; style-src 'self'; font-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_ORIGIN = re.compile(r"https?://[a-z0-9]([a-z0-9.-]*[a-z0-9])?(:[0-9]{1,5})?", re.IGNORECASE)


def mcp_origins_of(setting: str) -> list[str]:
    """Split a list with commas. Raises ValueError for an origin that a policy can't name."""
    origins = [part.strip() for part in setting.split(",") if part.strip()]
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"--mcp-origins: {origin} is not an origin. Give http or https, a name or an IPv4 "
                "address, and an optional port, as in https://tools.example.com:8443."
            )
    return origins


def page_policy(mcp_origins: Sequence[str]) -> str:
    """Return the policy of pages that send requests to their own server and to these origins.

    A wildcard would let text of a model or of a tool send a conversation to any server.
    """
    return "; ".join((_FIXED, " ".join(("connect-src 'self'", *mcp_origins))))
