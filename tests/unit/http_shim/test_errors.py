"""Errors as clients of each API see them."""

import grpc
import pytest

from services.http_shim.dialects.messages.write import message_error
from services.http_shim.errors import error_body, public_message
from tokenwire.errors import ServiceError

ADDRESS = "10.1.2.3:50051"


@pytest.mark.parametrize("reason", ["UNREACHABLE", "SESSION_LOST", "ENGINE_LOST", "UNKNOWN", ""])
def test_clients_see_no_inner_addresses(reason: str) -> None:
    error = ServiceError(grpc.StatusCode.UNAVAILABLE, reason, f"ipv4:{ADDRESS}: refused")
    for shown in (
        public_message(error),
        error_body(error).decode(),
        message_error(error, "r").decode(),
    ):
        assert ADDRESS not in shown
        assert "model" in shown  # says what failed


def test_clients_see_what_was_wrong_with_their_request() -> None:
    error = ServiceError(
        grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD", "n must be 1.", field="n"
    )
    assert public_message(error) == "n must be 1."
    assert "n must be 1." in message_error(error, "r").decode()
