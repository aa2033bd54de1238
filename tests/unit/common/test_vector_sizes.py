"""The limit of token states in an answer."""

import grpc
import pytest

from services.common.contract import MAX_TOKEN_STATES
from services.common.token_states import check_token_states
from tokenwire.channel import MESSAGE_LIMIT
from tokenwire.errors import ServiceError


def test_states_that_no_message_holds_are_refused_before_they_are_computed() -> None:
    """The largest answer leaves room for the rest of its message."""
    assert MAX_TOKEN_STATES < MESSAGE_LIMIT
    most = MAX_TOKEN_STATES // (1024 * 4)
    check_token_states(most, 1024, "inputs")
    with pytest.raises(ServiceError, match="Send fewer or shorter texts") as refused:
        check_token_states(most + 1, 1024, "inputs")
    assert (refused.value.code, refused.value.field) == (grpc.StatusCode.OUT_OF_RANGE, "inputs")
