"""Errors that every service tells alike, and how a call ends with one."""

from contextlib import suppress
from typing import Any, NoReturn

import grpc

from tokenwire.errors import DETAILS_KEY, ServiceError

__all__ = ["abort", "cut_stalled", "draining_error", "internal_error"]


def internal_error() -> ServiceError:
    """A defect of ours, told without its details."""
    return ServiceError(grpc.StatusCode.INTERNAL, "INTERNAL", "The server failed; see its log.")


def draining_error() -> ServiceError:
    """Return the error of a request that comes while the service shuts down."""
    message = "The service is shutting down and takes no new requests; try again."
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "DRAINING", message, retry_seconds=1)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: ServiceError) -> NoReturn:
    """End a call with an error, which its trailers carry beside what they were given before."""
    details = (DETAILS_KEY, error.to_status().SerializeToString())
    await context.abort(error.code, error.message, (*context.trailing_metadata(), details))


async def cut_stalled(context: grpc.aio.ServicerContext[Any, Any], seconds: float) -> None:
    """End a call whose client reads nothing. Its handler is blocked meanwhile: it goes on, to its
    end, only when the client reads or disconnects."""
    message = f"The client read nothing for {seconds:g} s."
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    with suppress(grpc.aio.AbortError):
        await abort(context, ServiceError(code, "STALLED", message, retry_seconds=1))
