"""Priorities: an int32 in decimal digits, nothing that only Python takes for a number."""

import pytest

from services.common.priority import parse_priority
from tokenwire.errors import ServiceError


@pytest.mark.parametrize("number", [-(2**31), -1, 0, 7, 2**31 - 1])
def test_int32_is_read(number: int) -> None:
    assert parse_priority(str(number)) == number
    assert parse_priority(f"{number:+d}") == number


@pytest.mark.parametrize(
    "text", ["", "high", "1.0", "1_000", " 1", "1\n", "٣", "2147483648", "-2147483649", "9" * 5000]
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ServiceError) as refused:
        parse_priority(text)
    assert refused.value.field == "x-priority"
