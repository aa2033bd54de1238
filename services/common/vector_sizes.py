"""Limit of the states of tokens that a request for vectors may ask for."""

import grpc

from services.common.contract import MAX_TOKEN_STATES
from tokenwire.errors import ServiceError

__all__ = ["check_token_states"]

_FLOAT_BYTES = 4


def check_token_states(tokens: int, width: int, field: str) -> None:
    """Raise OUT_OF_RANGE if the float32 states of `tokens` tokens are too large for one answer.

    width: numbers of a state. field: the prompts' field in the request.
    """
    size = tokens * width * _FLOAT_BYTES
    if size > MAX_TOKEN_STATES:
        raise ServiceError(
            grpc.StatusCode.OUT_OF_RANGE,
            "TOO_MANY_TOKENS",
            f"The states of all {tokens:,} tokens have {size:,} bytes; the limit is "
            f"{MAX_TOKEN_STATES:,}. Send fewer or shorter texts.",
            field=field,
        )
