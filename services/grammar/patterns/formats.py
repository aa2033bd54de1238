"""Formats of JSON Schema for which llguidance's own expressions are too wide.

Where the standards set no bound on digits, these expressions do: a model may otherwise repeat
digits until its output is cut.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["FORMATS"]


@dataclass(frozen=True, slots=True)
class Format:
    """The texts of a format."""

    expressions: Sequence[str]
    """Expressions in llguidance's syntax, each of which must match the whole text."""
    max_length: int | None = None
    """Longest text in characters; None = unlimited."""


# RFC 3339, 5.6. Most date libraries have no year 0. February 29 exists only in leap years, and leap
# seconds only at 23:59:60 UTC.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_FRACTION = r"(?:\.[0-9]{1,9})?"
_TIME = (
    f"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}"
    "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    f"|23:59:60{_FRACTION}(?:[zZ]|[+-]00:00))"
)
# RFC 3339, appendix A
_COUNT = "[0-9]{1,9}"
_TIME_SPAN = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DATE_SPAN = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_DURATION = f"P(?:{_DATE_SPAN}(?:{_TIME_SPAN})?|{_TIME_SPAN}|{_COUNT}W)"
# RFC 1123, 2.1, with the lengths of RFC 1035, 2.3.4. RFC 5891, 4.2.3.1 reserves "--" after two
# characters for internationalized names.
_LETTER = "[0-9A-Za-z]"
_LABEL = (
    f"(?:{_LETTER}(?:[0-9A-Za-z-]{{0,2}}{_LETTER})?"
    f"|{_LETTER}[0-9A-Za-z-](?:{_LETTER}[0-9A-Za-z-]|-{_LETTER})[0-9A-Za-z-]{{0,58}}{_LETTER})"
)
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
# RFC 5321, 4.1.2, with the lengths of 4.5.3.1, without quoted local parts and IPv6 addresses
_WORD = "[0-9A-Za-z!#$%&'*+\\-/=?^_`{|}~]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_EMAIL = rf"{_WORD}(?:\.{_WORD})*@(?:{_HOSTNAME}|\[(?:{_BYTE}\.){{3}}{_BYTE}\])"
_EMAIL_LENGTHS = "[^@]{1,64}@(?s:.)*"

FORMATS: Mapping[str, Format] = {
    "date": Format([_DATE]),
    "date-time": Format([f"{_DATE}[tT]{_TIME}"]),
    "duration": Format([_DURATION]),
    "email": Format([_EMAIL, _EMAIL_LENGTHS], max_length=254),
    "hostname": Format([_HOSTNAME], max_length=253),
    "time": Format([_TIME]),
}
"""Formats by name. llguidance's own expressions enforce the other ENFORCED_FORMATS."""
