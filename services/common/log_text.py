"""Log records as lines that people read on a terminal."""

import json
import os
from collections.abc import Mapping
from datetime import datetime

__all__ = ["LOG_FORMATS", "is_text", "record_text", "rendered", "wants_colours"]

LOG_FORMATS = ("auto", "text", "json")
_RESET = "\x1b[0m"
_DIM = "\x1b[2m"
_LEVEL_COLOURS = {"debug": _DIM, "warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}
_RECORD_BEGIN = b'{"time": '
_SHOWN_FIRST = ("time", "level", "service", "message", "exception")


def is_text(log_format: str, descriptor: int) -> bool:
    """Return whether log lines are text: with "auto", on a terminal alone."""
    return log_format == "text" or (log_format == "auto" and os.isatty(descriptor))


def wants_colours(descriptor: int) -> bool:
    """Return whether text may have colours (https://no-color.org)."""
    variables = os.environ
    is_dumb = variables.get("TERM") == "dumb"
    return os.isatty(descriptor) and not variables.get("NO_COLOR") and not is_dumb


def record_text(fields: Mapping[str, object], *, colours: bool) -> str:
    """Return a record as a line: time, level, service, message, then the fields that it leaves out.

    A traceback follows in lines of its own. Control characters, which a client may have chosen, are
    escaped.
    """

    def painted(text: str, colour: str) -> str:
        return f"{colour}{text}{_RESET}" if colours and colour else text

    level, message = str(fields.get("level", "")), str(fields.get("message", ""))
    words = frozenset(message.split())
    parts = [
        painted(_clock(fields.get("time")), _DIM),
        painted(f"{level:7}", _LEVEL_COLOURS.get(level, "")),
        f"{_printable(str(fields.get('service', ''))):9}",
        _printable(message),
        *(
            f"{painted(f'{_printable(name)}=', _DIM)}{_value(value)}"
            for name, value in fields.items()
            if name not in _SHOWN_FIRST and str(value) not in words
        ),
    ]
    line = " ".join(parts)
    if "exception" in fields:
        traceback = str(fields["exception"]).splitlines()
        line += "".join(f"\n    {_printable(each)}" for each in traceback)
    return line


def rendered(lines: bytes, *, colours: bool) -> bytes:
    """Return lines of which JSON records are text. Other lines, such as progress bars, stay."""
    return b"\n".join(_line(line, colours) for line in lines.split(b"\n"))


def _line(line: bytes, colours: bool) -> bytes:
    bar, begin, rest = line.partition(_RECORD_BEGIN)  # a bar has no end of line while it grows
    if not begin:
        return line
    try:
        fields = json.loads(begin + rest)
        text = record_text(fields, colours=colours).encode("utf-8", "backslashreplace")
        return bar + b"\n" + text if bar else text
    except (ValueError, AttributeError):
        return line


def _clock(time: object) -> str:
    """Return the local time of day of an ISO 8601 time."""
    try:
        return f"{datetime.fromisoformat(str(time)).astimezone():%H:%M:%S}"
    except ValueError:
        return "--:--:--"


def _value(value: object) -> str:
    """Return a value as one word; a text that has several is quoted."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    is_word = bool(text) and not any(each.isspace() or each in '"=' for each in text)
    return _printable(text if is_word or not isinstance(value, str) else json.dumps(text))


def _printable(text: str) -> str:
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in text
    )
