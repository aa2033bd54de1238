"""ServiceError: errors that quote a request must reach the client, whatever they quote."""

import base64

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenwire.errors import ServiceError, invalid

LIMIT = 8 * 1024
"""Bytes of metadata that gRPC always transmits"""
REST = 500
"""Bytes for the other trailers: the request's id, the status, names of keys"""


def trailers(error: ServiceError) -> int:
    """Return the bytes of the message, percent-encoded, and of the details, in base64."""
    message = error.to_status().message.encode()
    encoded = sum(1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3 for byte in message)
    return encoded + len(base64.b64encode(error.to_status().SerializeToString()))


@pytest.mark.parametrize("text", ["x", "%", "\x01", "é", "名", "😀", "\udcff"])
def test_error_that_quotes_megabytes_fits_into_the_trailers(text: str) -> None:
    """gRPC drops larger trailers, and the client then sees a wrong code."""
    error = invalid(text * 1_000_000, f"The model {text * 1_000_000} does not exist.")
    assert trailers(error) + REST < LIMIT
    assert error.message.startswith("The model ")
    assert error.message.endswith(" does not exist.")
    assert 300 < len(str(error)) <= 1_200


@given(st.text(max_size=300))
def test_short_message_is_unchanged(text: str) -> None:
    error = ServiceError(grpc.StatusCode.NOT_FOUND, "X", text, field=text[:50])
    again = ServiceError.from_status(error.to_status())
    assert (again.message, again.field) == (error.message, error.field) == (text, text[:50])


@given(st.integers(1_000, 1_500), st.sampled_from("xé名😀"))
def test_shortened_message_is_not_shortened_again(length: int, text: str) -> None:
    """An error passes through three services."""
    error = invalid("", text * length)
    assert invalid("", error.message).message == error.message
