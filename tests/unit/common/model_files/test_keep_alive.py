"""Keep-alive: Ollama's forms of a time."""

import math

import pytest

from services.common.model_files.keep_alive import parse_keep_alive


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("5m", 300),
        ("1h30m", 5400),
        ("1.5h", 5400),
        ("250ms", 0.25),
        ("90", 90),
        (90, 90),
        (0, 0),
        ("0", 0),
        ("0s", 0),
        (-1, math.inf),
        ("-1", math.inf),
        ("-1m", math.inf),
    ],
)
def test_ollamas_forms_of_a_time_are_read(value: str | float, seconds: float) -> None:
    assert parse_keep_alive(value) == seconds


@pytest.mark.parametrize("value", ["", "m", "5 m", "soon", "1d", "5m!", "--1", "9" * 200 + "x"])
def test_other_texts_are_refused_with_the_forms_that_there_are(value: str) -> None:
    with pytest.raises(ValueError, match="such as 5m"):
        parse_keep_alive(value)


def test_a_number_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="such as 5m"):
        parse_keep_alive(math.nan)
