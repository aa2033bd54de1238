"""Errors of loads on demand, as the users of models get them."""

import math

import grpc

from services.common.host_memory import in_units
from tokenwire.errors import ServiceError
from tokenwire.serving.load_plan import Room
from tokenwire.serving.managed_model import ManagedModel

__all__ = [
    "in_use",
    "load_failed",
    "load_late",
    "never_fits",
    "queue_full",
    "stopping",
    "unloaded",
]


def load_failed(managed: ManagedModel) -> ServiceError:
    """Return the error of the users of a model whose load has failed."""
    seconds = managed.retry_seconds
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "LOAD_FAILED",
        f"The model {managed.name} can't be loaded: {managed.error} "
        f"A request after {math.ceil(seconds)} s tries again.",
        retry_seconds=seconds,
    )


def never_fits(managed: ManagedModel, room: Room, retry_seconds: float) -> ServiceError:
    """Return the error of the users of a model that is larger than all memory for models."""
    needed = in_units(managed.memory_bytes or 0)
    return ServiceError(
        grpc.StatusCode.UNAVAILABLE,
        "MODEL_TOO_LARGE",
        f"The model {managed.name} takes {needed}, and all models together may take "
        f"{in_units(room.memory_bytes)} (--memory). Raise that, or serve a smaller model.",
        retry_seconds=retry_seconds,
    )


def unloaded(name: str) -> ServiceError:
    """Return the error of the users of a model that an operator has unloaded."""
    message = f"An operator has unloaded the model {name}; a new request loads it again."
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "MODEL_UNLOADED", message, retry_seconds=1)


def in_use(what: str) -> ServiceError:
    """Return the error of an operator who unloads a used model. what: a sentence about its use."""
    message = f"{what} Wait for them, or set force to end them."
    return ServiceError(grpc.StatusCode.ABORTED, "MODEL_IN_USE", message)


def load_late(message: str) -> ServiceError:
    """Return the error of a user who has waited too long for a model."""
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "LOAD_LATE", message, retry_seconds=5)


def queue_full(most: int) -> ServiceError:
    """Return the error of a user who finds the queue full. most: its size."""
    message = f"{most} users already wait for models; try again."
    return ServiceError(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL", message, retry_seconds=1)


def stopping() -> ServiceError:
    """Return the error of the users of models that a stopping server neither loads nor fetches."""
    message = "The server is stopping; ask again when it serves."
    return ServiceError(grpc.StatusCode.UNAVAILABLE, "STOPPING", message, retry_seconds=1)
