"""Strings that know which of their characters a chat template wrote.

A template's string operations see the text alone, so their results are those of plain strings.
Characters whose origin an operation does not keep count as the request's, never as the template's:
a control token may become text, but text never becomes a control token. The method is positive
tainting (Halfond, Orso and Manolios, "Using positive tainting and syntax-aware evaluation to
counter SQL injection attacks", 2006).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import SupportsIndex

from markupsafe import Markup, escape

from services.common.json_values import Json

__all__ = [
    "TracedMarkup",
    "TracedText",
    "from_request",
    "from_template",
    "is_template_text",
    "join_traced",
    "plain_text",
    "template_spans",
    "trace_json",
]

_REQUEST, _TEMPLATE = b"\0", b"\1"
_FIELD = re.compile("%[%sd]")


class TracedText(str):
    """A string that records for each character whether the template wrote it.

    Every attribute without an underscore is one of `str`, because templates can read them.
    """

    __slots__ = ("_origins",)
    _origins: bytes

    def __new__(cls, text: str = "", origins: bytes | None = None) -> "TracedText":
        """Return the text; without `origins`, all of it is the request's."""
        traced = super().__new__(cls, text)
        traced._origins = _REQUEST * len(text) if origins is None else origins
        return traced

    def __str__(self) -> "TracedText":
        return self

    def __add__(self, other: object) -> "TracedText":
        if not isinstance(other, str) or isinstance(other, Markup):
            return NotImplemented  # Markup's own method escapes this text
        return TracedText(str.__add__(self, other), self._origins + _origins_of(other))

    def __radd__(self, other: str) -> "TracedText":
        return TracedText(other + plain_text(self), _origins_of(other) + self._origins)

    def __mul__(self, count: SupportsIndex) -> "TracedText":
        return TracedText(super().__mul__(count), self._origins * count)

    __rmul__ = __mul__

    def __mod__(self, values: object) -> "TracedText":
        text = super().__mod__(values)
        if not isinstance(values, tuple):
            values = (values,)
        fields = [field.start() for field in _FIELD.finditer(self) if field[0] != "%%"]
        if len(fields) != len(values) or self.count("%") != len(fields):
            return TracedText(text)  # another form of a field: its place is not known
        pieces: list[str] = []
        at = 0
        for field, value in zip(fields, values, strict=True):
            pieces += (self[at:field], value if isinstance(value, str) else str(value))
            at = field + 2
        joined = join_traced([*pieces, self[at:]])
        return joined if joined == text else TracedText(text)

    def __getitem__(self, key: SupportsIndex | slice) -> "TracedText":
        text = super().__getitem__(key)
        if isinstance(key, slice):
            return TracedText(text, self._origins[key])
        return TracedText(text, bytes((self._origins[key],)))

    def __iter__(self) -> Iterator["TracedText"]:
        for place in range(len(self)):
            yield self[place]

    def strip(self, chars: str | None = None, /) -> "TracedText":
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> "TracedText":
        return self[len(self) - len(super().lstrip(chars)) :]

    def rstrip(self, chars: str | None = None, /) -> "TracedText":
        return self[: len(super().rstrip(chars))]

    def removeprefix(self, prefix: str, /) -> "TracedText":
        return self[len(prefix) :] if self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> "TracedText":
        return self[: len(self) - len(suffix)] if self.endswith(suffix) else self

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._located(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._located(super().splitlines(keepends), None)

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parted(self.find(sep), super().partition(sep))

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._parted(self.rfind(sep), super().rpartition(sep))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> "TracedText":
        if not old:
            return TracedText(super().replace(old, new, count))
        return TracedText(new, _origins_of(new)).join(self.split(old, count))

    def join(self, pieces: Iterable[str], /) -> "TracedText":
        pieces = [*pieces]
        return TracedText(super().join(pieces), self._origins.join(map(_origins_of, pieces)))

    def lower(self) -> "TracedText":
        return self._mapped(super().lower())

    def upper(self) -> "TracedText":
        return self._mapped(super().upper())

    def capitalize(self) -> "TracedText":
        return self._mapped(super().capitalize())

    def title(self) -> "TracedText":
        return self._mapped(super().title())

    def _mapped(self, text: str) -> "TracedText":
        """Return `text`, which has one character for each of this one, with the same origins."""
        return TracedText(text, self._origins if len(text) == len(self) else None)

    def _located(self, pieces: Sequence[str], separator: str | None) -> list[str]:
        """Return pieces of this text with their origins. separator: None = white space."""
        located: list[str] = []
        at = 0
        for piece in pieces:
            begin = self.find(piece, at) if separator is None else at
            located.append(self[begin : begin + len(piece)])
            at = begin + len(piece) + len(separator or "")
        return located

    def _parted(self, place: int, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        before, separator, after = parts
        if place < 0:
            return (self if before else from_request("")), separator, (self if after else after)
        return self[:place], self[place : place + len(separator)], self[place + len(separator) :]


class TracedMarkup(Markup):
    """Result of the filter `safe`: it escapes the HTML of texts that it is added to."""

    __slots__ = ("_origins",)
    _origins: bytes

    def __new__(cls, text: str, origins: bytes | None = None) -> "TracedMarkup":
        markup = super().__new__(cls, plain_text(text))
        markup._origins = _origins_of(text) if origins is None else origins
        return markup

    def __str__(self) -> TracedText:
        return TracedText(super().__str__(), self._origins)

    def __add__(self, other: object) -> "TracedMarkup":
        return _joined_markup(self, other) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: object) -> "TracedMarkup":
        return _joined_markup(other, self) if isinstance(other, str) else NotImplemented


def from_template(text: str) -> TracedText:
    """Return a text that the template wrote."""
    return TracedText(text, _TEMPLATE * len(text))


def from_request(text: str) -> TracedText:
    """Return a text of the request."""
    return TracedText(text)


def join_traced(pieces: Iterable[str]) -> TracedText:
    """Return the concatenation of the pieces, with their origins."""
    return from_request("").join(pieces)


def is_template_text(text: TracedText) -> bool:
    """Return whether the template wrote all characters."""
    return _REQUEST not in text._origins


def template_spans(text: TracedText) -> list[int]:
    """Return begin and end of each run of characters that the template wrote, in one list."""
    origins, spans, end = text._origins, list[int](), 0
    while (begin := origins.find(_TEMPLATE, end)) >= 0:
        end = origins.find(_REQUEST, begin)
        if end < 0:
            end = len(origins)
        spans += (begin, end)
    return spans


def plain_text(text: str) -> str:
    """Return the text as an exact `str`."""
    return str.__str__(text)


def trace_json(value: Json) -> Json:
    """Return the value with all of its strings as texts of the request."""
    if isinstance(value, str):
        return from_request(value)
    if isinstance(value, list):
        return [trace_json(part) for part in value]
    if isinstance(value, dict):
        return {from_request(key): trace_json(part) for key, part in value.items()}
    return value


def _origins_of(text: str) -> bytes:
    if isinstance(text, TracedText | TracedMarkup):
        return text._origins
    return _REQUEST * len(text)


def _joined_markup(*texts: str) -> TracedMarkup:
    return TracedMarkup(join_traced(map(_escaped, texts)))


def _escaped(text: str) -> str:
    """Return the text with the HTML in it escaped, unless it is Markup already."""
    if isinstance(text, Markup):
        return text
    pieces = [plain_text(escape(plain_text(character))) for character in text]
    origins = [_origins_of(text)[at : at + 1] * len(piece) for at, piece in enumerate(pieces)]
    return TracedText("".join(pieces), b"".join(origins))
