"""Limits of the vectors that one answer holds."""

import grpc

from services.common.contract import MAX_TOKEN_STATES, MAX_VECTORS
from tokenwire.errors import ServiceError

__all__ = ["check_token_states", "check_vectors"]

_FLOAT_BYTES = 4


def check_token_states(tokens: int, width: int, field: str) -> None:
    """Raise OUT_OF_RANGE if the float32 states of `tokens` tokens are too large for one answer.

    width: numbers of a state. field: the prompts' field in the request.
    """
    if (size := tokens * width * _FLOAT_BYTES) > MAX_TOKEN_STATES:
        raise ServiceError(
            grpc.StatusCode.OUT_OF_RANGE,
            "TOO_MANY_TOKENS",
            f"The states of all {tokens:,} tokens have {size:,} bytes; the limit is "
            f"{MAX_TOKEN_STATES:,}. Send fewer or shorter texts.",
            field=field,
        )


def check_vectors(texts: int, width: int, field: str) -> None:
    """Raise OUT_OF_RANGE if the float32 vectors of `texts` texts are too large for one answer.

    width: numbers of a vector. field: the texts' field in the request.
    """
    if (size := texts * width * _FLOAT_BYTES) > MAX_VECTORS:
        raise ServiceError(
            grpc.StatusCode.OUT_OF_RANGE,
            "TOO_MANY_TEXTS",
            f"The vectors of {texts:,} texts have {size:,} bytes; the limit is {MAX_VECTORS:,}. "
            "Send fewer texts.",
            field=field,
        )
