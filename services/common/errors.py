"""Errors common to all services, and how they reach the caller of an RPC."""

import errno
import sys
from contextlib import suppress
from typing import Any, NoReturn

import grpc

from tokenwire.errors import DETAILS_KEY, ServiceError

__all__ = ["abort", "cut_stalled", "draining_error", "internal_error", "out_of_resources"]

_NO_PIPE = -1  # errno of uvloop's error if a new process gets no pipe
_LACKS = {
    *(errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.EDQUOT),
    _NO_PIPE,
}
_NO_THREAD = "can't start new thread"


def internal_error() -> ServiceError:
    """Return the error for the exception that is being handled, without its details.

    This is INTERNAL, or UNAVAILABLE if the machine lacks memory, disk, files or processes.
    """
    lack = out_of_resources(sys.exception())
    defect = "INTERNAL", "The server failed; see its log."
    return lack or ServiceError(grpc.StatusCode.INTERNAL, *defect)


def out_of_resources(error: BaseException | None) -> ServiceError | None:
    """Return UNAVAILABLE if the error is a lack of resources, which may be temporary; else None."""
    if not (
        (isinstance(error, OSError) and error.errno in _LACKS)
        or isinstance(error, MemoryError)
        or (isinstance(error, RuntimeError) and _NO_THREAD in str(error))
    ):
        return None
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "OUT_OF_RESOURCES",
        "The server has no process, thread, file, memory or disk left for the request; try again.",
        retry_seconds=1,
    )


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
