"""Log lines for people: what they show, and what a client can't make them do to a terminal."""

import json
import os
import pty
import subprocess
import sys

import pytest

from services.common.log_text import record_text, rendered

RECORD = {
    "time": "2026-11-29T13:00:07.123+00:00",
    "level": "warning",
    "service": "jobs",
    "message": "batch b1: failed",
    "request_id": "req_1",
    "path": "a b",
    "milliseconds": 0.5,
}


def test_line_has_time_level_service_message_and_fields() -> None:
    line = record_text(RECORD, colours=False)
    assert line[2:6:3] == "::"
    assert line[8:] == (
        ' warning jobs      batch b1: failed request_id=req_1 path="a b" milliseconds=0.5'
    )


def test_field_that_the_message_has_as_a_word_is_not_repeated() -> None:
    line = record_text(RECORD | {"message": "req_1 ended"}, colours=False)
    assert line.count("req_1") == 1


def test_traceback_follows_in_lines_of_its_own() -> None:
    line = record_text(RECORD | {"exception": "Traceback:\n  x"}, colours=False)
    assert line.splitlines()[1:] == ["    Traceback:", "      x"]


@pytest.mark.parametrize("name", ["message", "path", "service"])
def test_control_characters_of_a_client_are_escaped(name: str) -> None:
    """They could hide lines or fake others on the terminal of an operator."""
    line = record_text(RECORD | {name: "x\x1b[2J\r\nerror"}, colours=True)
    assert "\x1b[2J" not in line
    assert "\r" not in line
    assert len(line.splitlines()) == 1


def test_lines_that_are_no_records_stay() -> None:
    record = json.dumps(RECORD)
    lines = f"\rloading 3 of 12 MB{record}\nTraceback\n{{no record\n{record}\n".encode()
    shown = rendered(lines, colours=False).decode().split("\n")
    assert shown[0] == "\rloading 3 of 12 MB"
    assert "batch b1: failed" in shown[1]
    assert shown[2:4] == ["Traceback", "{no record"]
    assert shown[4] == shown[1]


def first_line(*flags: str, terminal: bool, **variables: str) -> str:
    """Return the first line that a shim logs."""
    command = [sys.executable, "-m", "services.http_shim", "--tokenizer", "127.0.0.1:9"]
    source, stderr = pty.openpty() if terminal else os.pipe()
    environment = {key: value for key, value in os.environ.items() if key != "NO_COLOR"}
    shim = subprocess.Popen(
        [*command, "--port", "0", *flags], stderr=stderr, env=environment | variables
    )
    os.close(stderr)
    text = b""
    while b"\n" not in text:
        text += os.read(source, 65_536)
    shim.terminate()
    shim.wait(60)
    os.close(source)
    return text.decode().splitlines()[0]


@pytest.mark.parametrize(
    ("flags", "terminal", "variables", "is_text", "has_colours"),
    [
        ((), True, {"TERM": "xterm"}, True, True),
        ((), True, {"TERM": "xterm", "NO_COLOR": "1"}, True, False),
        ((), True, {"TERM": "dumb"}, True, False),
        ((), False, {}, False, False),
        (("--log-format", "text"), False, {"TERM": "xterm"}, True, False),
        (("--log-format", "json"), True, {"TERM": "xterm"}, False, False),
    ],
)
def test_log_is_text_on_a_terminal_and_json_elsewhere(
    flags: tuple[str, ...],
    terminal: bool,
    variables: dict[str, str],
    is_text: bool,
    has_colours: bool,
) -> None:
    line = first_line(*flags, terminal=terminal, **variables)
    assert "the API is open" in line
    assert line.startswith("{") is not is_text
    assert ("\x1b[" in line) is has_colours
