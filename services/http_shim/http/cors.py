"""CORS for the origins that the operator names."""

import re
from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

__all__ = ["cors", "origins_of"]

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", re.IGNORECASE)
_EXPOSED_HEADERS = (
    "retry-after",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "x-request-id",
    "x-tokens-used",
    "x-tokenwire-ignored",
)


def origins_of(setting: str) -> list[str]:
    """Split a list with commas; "*" stands for all. Raises ValueError for an invalid origin."""
    origins = [part.strip() for part in setting.split(",") if part.strip()]
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin} is not an origin; give a scheme, a host and an optional port, "
                "as in https://example.com:8443."
            )
    return origins


def cors(origins: Sequence[str]) -> Middleware:
    """Return middleware that lets pages of these origins call the API and read every answer."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED_HEADERS,
    )
