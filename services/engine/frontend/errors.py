"""Errors that the frontend ends requests with."""

import grpc

from tokenwire.errors import ServiceError

__all__ = ["aborted", "deadline_exceeded", "engine_lost", "loading", "queue_full"]


def loading() -> ServiceError:
    """Return the error of calls that come before the model is loaded."""
    return _unavailable("LOADING", "The model is loading.")


def engine_lost(message: str) -> ServiceError:
    """Return the error of requests whose loop process has died."""
    return _unavailable("ENGINE_LOST", message)


def queue_full(message: str) -> ServiceError:
    """Return the error of a request that finds no room."""
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    return ServiceError(code, "QUEUE_FULL", message, retry_seconds=1)


def aborted() -> ServiceError:
    """Return the error of a request that an operator aborted."""
    return ServiceError(grpc.StatusCode.CANCELLED, "ABORTED", "An operator aborted the request.")


def deadline_exceeded() -> ServiceError:
    """Return the error of a request that ran past its deadline."""
    code = grpc.StatusCode.DEADLINE_EXCEEDED
    return ServiceError(code, "DEADLINE_EXCEEDED", "The deadline passed.")


def _unavailable(reason: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, message, retry_seconds=1)
