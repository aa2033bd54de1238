"""Which pages of a browser may use the API: those of origins that the operator names."""

import re
from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

__all__ = ["cors", "origins_of"]

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#]+", re.IGNORECASE)
_READABLE = (
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
    """The origins of a list with commas; "*" stands for all. Raises ValueError for what is none."""
    origins = [part.strip() for part in setting.split(",") if part.strip()]
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"{origin} is no origin; one is a scheme, a host and a port if need be, "
                "as in https://example.com:8443."
            )
    return origins


def cors(origins: Sequence[str]) -> Middleware:
    """Lets pages of these origins send requests and read the answers, errors too."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_READABLE,
    )
