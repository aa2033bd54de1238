"""The limits of vectors in an answer."""

from collections.abc import Callable

import grpc
import pytest

from services.common.contract import MAX_EMBEDDED_TEXTS, MAX_TOKEN_STATES, MAX_VECTORS
from services.common.vector_sizes import check_token_states, check_vectors
from tokenwire.channel_options import MESSAGE_LIMIT
from tokenwire.errors import ServiceError


@pytest.mark.parametrize(
    ("check", "limit"), [(check_token_states, MAX_TOKEN_STATES), (check_vectors, MAX_VECTORS)]
)
def test_vectors_that_no_message_holds_are_refused_before_they_are_computed(
    check: Callable[[int, int, str], None], limit: int
) -> None:
    """The largest answer leaves room for the rest of its message."""
    assert limit < MESSAGE_LIMIT
    most = limit // (1024 * 4)
    check(most, 1024, "inputs")
    with pytest.raises(ServiceError, match="Send fewer") as refused:
        check(most + 1, 1024, "inputs")
    assert (refused.value.code, refused.value.field) == (grpc.StatusCode.OUT_OF_RANGE, "inputs")


def test_as_many_texts_as_the_contract_allows_have_vectors_of_any_published_width() -> None:
    check_vectors(MAX_EMBEDDED_TEXTS, 5_120, "inputs")
