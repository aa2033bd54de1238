"""Log fields of failed requests."""

import logging
import re

import grpc

from tokenwire.errors import ServiceError

__all__ = ["failure"]

_QUOTING = frozenset(
    {
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)
"""Codes of errors whose messages may quote what the client wrote"""
_FIELD = re.compile(r"\w*")
"""First name of a field's path, which is never text of the client"""


def failure(log: logging.Logger, error: ServiceError) -> dict[str, str]:
    """Return the log fields of a failed request.

    A message that may quote the client is logged at level debug only.
    """
    fields = {"reason": error.reason}
    if (field := _FIELD.match(error.field)) is not None and field[0]:
        fields["field"] = field[0]
    if error.code not in _QUOTING or log.isEnabledFor(logging.DEBUG):
        fields["error"] = error.message
    return fields
