"""Refusals of fields that Tokenwire can't serve, and images from data URLs."""

import base64
import binascii
from typing import NoReturn

import grpc

from tokenwire.errors import ServiceError, invalid

__all__ = ["image_of_data_url", "refuse"]

_DATA = "data:"
_BASE64 = ";base64"


def refuse(field: str, why: str) -> NoReturn:
    """Raise UNIMPLEMENTED for a field."""
    code = grpc.StatusCode.UNIMPLEMENTED
    raise ServiceError(code, "NOT_IMPLEMENTED", f"{field} is not supported: {why}.", field=field)


def image_of_data_url(url: str, field: str) -> bytes:
    """Return the encoded image of a data URL. Raises INVALID_ARGUMENT and UNIMPLEMENTED."""
    head, comma, data = url.partition(",")
    if not (head.startswith(_DATA) and head.endswith(_BASE64) and comma):
        refuse(field, "only data URLs in base64 are taken")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise invalid(field, f"The URL is not base64: {error}.") from None
