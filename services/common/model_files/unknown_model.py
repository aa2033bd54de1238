"""Error of a request for a model that no row of the catalog has."""

from collections.abc import Iterable
from difflib import get_close_matches

import grpc

from tokenwire.errors import ServiceError

__all__ = ["model_not_found"]

_MOST_COMPARED = 10_000
"""Most names that are compared, and most characters of a name: a comparison takes its time"""
_MOST_CHARACTERS = 200


def model_not_found(name: str, known: Iterable[str] = ()) -> ServiceError:
    """Return the NOT_FOUND error for an unknown name. It says which of `known` are similar."""
    names = list(known)[:_MOST_COMPARED]
    near = get_close_matches(name[:_MOST_CHARACTERS], names, n=3, cutoff=0.6)
    similar = f" Similar names: {', '.join(near)}." if near else ""
    return ServiceError(
        grpc.StatusCode.NOT_FOUND,
        "MODEL_NOT_FOUND",
        f"The model {name} does not exist; GET /v1/models lists the models.{similar}",
        field="model",
    )
