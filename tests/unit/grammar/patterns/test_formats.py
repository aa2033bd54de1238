"""Generated texts follow the standard of their format."""

import ipaddress
import json
import re
import uuid
from calendar import isleap
from collections.abc import Callable
from datetime import date, datetime, time
from urllib.parse import urlsplit

import pytest
from jsonschema import Draft202012Validator
from llguidance import LLTokenizer

from services.common.annotations import ENFORCED_FORMATS
from tests.unit.grammar.drawing import TOKENIZERS, Drawing


def is_date(text: str) -> bool:
    return date.fromisoformat(text).isoformat() == text


def is_time(text: str) -> bool:
    clock, fraction, zone = re.fullmatch(
        r"(\d\d:\d\d:\d\d)(\.\d{1,9})?([zZ]|[+-]\d\d:\d\d)", text
    ).groups()  # type: ignore[union-attr]
    offset = "+00:00" if zone in "zZ" else zone
    if clock == "23:59:60":
        return bool(offset[1:] == "00:00")
    return time.fromisoformat(clock + (fraction or "")[:7] + offset).tzinfo is not None


def is_date_time(text: str) -> bool:
    day, clock = re.split("[tT]", text)
    return is_date(day) and is_time(clock)


def is_duration(text: str) -> bool:
    days, clock = r"(\d{1,9}Y)?(\d{1,9}M)?(\d{1,9}D)?", r"(\d{1,9}H)?(\d{1,9}M)?(\d{1,9}S)?"
    return re.fullmatch(
        rf"P(?!$)(\d{{1,9}}W|{days}(T(?!$){clock})?)", text
    ) is not None and not re.search(r"Y\d+D|H\d+S", text)


def is_hostname(text: str) -> bool:
    labels = text.split(".")
    return len(text) <= 253 and all(
        re.fullmatch(r"(?!-)(?!..--)[0-9A-Za-z-]{1,63}(?<!-)", label) for label in labels
    )


def is_email(text: str) -> bool:
    local, _, domain = text.rpartition("@")
    words = local.split(".")
    is_local = len(local) <= 64 and all(re.fullmatch(r"[\w!#$%&'*+/=?^`{|}~-]+", w) for w in words)
    is_address = domain.startswith("[") and ipaddress.IPv4Address(domain[1:-1]) is not None
    return is_local and len(text) <= 254 and (is_address or is_hostname(domain))


def is_uri(text: str) -> bool:
    parts = urlsplit(text)
    return (
        bool(parts.scheme)
        and re.fullmatch(r"[!#$%&'()*+,\-./:;=?@\[\]_~0-9A-Za-z]+", text) is not None
    )


CHECKS: dict[str, Callable[[str], object]] = {
    "date": is_date,
    "date-time": is_date_time,
    "duration": is_duration,
    "email": is_email,
    "hostname": is_hostname,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "time": is_time,
    "uri": is_uri,
    "uuid": uuid.UUID,
}


def test_every_enforced_format_has_a_check_here() -> None:
    assert CHECKS.keys() == ENFORCED_FORMATS


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("name", CHECKS)
def test_drawn_texts_have_their_format(name: str, tokenizer: LLTokenizer) -> None:
    checker = Draft202012Validator.FORMAT_CHECKER
    for text in Drawing({"type": "string", "format": name}, tokenizer).draw(150):
        assert CHECKS[name](text), text
        if ":60" not in text:
            checker.check(text, name)


@pytest.mark.parametrize(
    ("name", "allowed", "forbidden"),
    [
        (
            "date-time",
            ["2024-02-29T00:00:00Z", "2016-12-31T23:59:60Z", "2016-12-31t23:59:60.5+00:00",
             "1999-01-01T10:00:00.123456789-08:00"],
            ["2023-02-29T00:00:00Z", "2100-02-29T00:00:00Z", "2016-12-31T23:59:60+01:00",
             "2016-12-31T12:00:60Z", "1999-01-01T10:00:00.1234567890Z", "0000-01-01T00:00:00Z",
             "2024-01-01T24:00:00Z", "2024-01-01T00:00:00"],
        ),
        ("date", ["2000-02-29", "0004-02-29", "9999-12-31"],
         ["1900-02-29", "2024-04-31", "0000-01-01"]),
        ("time", ["23:59:60Z", "00:00:00.5-23:59"], ["22:59:60Z", "23:59:60+02:00", "00:00:00"]),
        ("duration", ["P1Y2M3D", "PT1H", "P1W", "P999999999D"],
         ["P", "PT", "P1Y2D", "P1W1D", "P1234567890D", "1D"]),
        ("hostname", ["a", "a.b-c", "x" * 63, "a-b1.c", "ab-c", "a--b"],
         ["x" * 64, "a.", "-a", "a-", "a..b", "xn--a", "ab--cd", "a_b", ".".join(["x" * 63] * 4)]),
        ("email", ["a@b", "a.b+c@example.com", "a" * 64 + "@b.c", "a@[127.0.0.1]"],
         ["a" * 65 + "@b.c", ".a@b", "a.@b", "a@" + "b" * 64, "a@-b", "a@[256.0.0.1]", "a b@c"]),
    ],
)  # fmt: skip
def test_edge_cases_of_formats(name: str, allowed: list[str], forbidden: list[str]) -> None:
    drawing = Drawing({"type": "string", "format": name})
    assert [text for text in allowed if not drawing.allows(json.dumps(text))] == []
    assert [text for text in forbidden if drawing.allows(json.dumps(text))] == []


def test_leap_days_are_those_of_the_calendar() -> None:
    drawing = Drawing({"type": "string", "format": "date"})
    for year in (*range(1, 30), *range(1890, 2110), *range(2380, 2420)):
        assert drawing.allows(f'"{year:04}-02-29"') == isleap(year)
    assert datetime.fromisoformat("0004-02-29")


def test_a_format_is_enforced_together_with_a_pattern_and_lengths() -> None:
    both = Drawing({"type": "string", "format": "date", "pattern": "^19.*1$"})
    assert all(re.fullmatch(r"19\d\d-\d\d-\d1", text) for text in both.draw(50))
    named = Drawing(
        {"type": ["string", "null"], "format": "email", "maxLength": 8, "pattern": "^x"}
    )
    for text in named.draw(50):
        assert text is None or (len(text) <= 8 and text.startswith("x") and is_email(text))
