"""Errors common to all services, and their way to the caller of an RPC."""

from contextlib import suppress
from typing import Any, NoReturn

import grpc

from tokenwire.errors import DETAILS_KEY, ServiceError

__all__ = ["abort", "cut_stalled", "draining_error", "internal_error"]


def internal_error() -> ServiceError:
    """Return the error for a defect of the server, without its details."""
    return ServiceError(grpc.StatusCode.INTERNAL, "INTERNAL", "The server failed; see its log.")


def draining_error() -> ServiceError:
    """Return the error of a request that comes while the service shuts down."""
    message = "The service is shutting down and takes no new requests; try again."
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", message, retry_seconds=1)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """End a call with an error, and add the error's details to the trailing metadata."""
    details = (DETAILS_KEY, error.to_status().SerializeToString())
    await context.abort(error.code, error.message, (*context.trailing_metadata(), details))


async def cut_stalled(context: grpc.aio.ServicerContext[Any, Any], seconds: float) -> None:
    """End a call whose client has read nothing for `seconds`.

    The call's handler stays blocked until the client reads or disconnects.
    """
    message = f"The client read nothing for {seconds:g} s."
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    with suppress(grpc.aio.AbortError):
        await abort(context, ServiceError(code, "STALLED", message, retry_seconds=1))
