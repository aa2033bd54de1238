"""Tests of rows that are repainted, on an emulated terminal."""

import io
import sys

import pyte
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenwire.cli.chat import live_rows
from tokenwire.cli.chat.live_rows import LiveRows

COLUMNS, HEIGHT = 20, 6
ROWS = st.lists(st.sampled_from(["", "a", "ab", "abc", "日本", "long row of words"]), max_size=5)


class Terminal:
    """Terminal that shows what a LiveRows writes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.screen = pyte.HistoryScreen(COLUMNS, HEIGHT, history=1000, ratio=0.5)
        self._stream = pyte.Stream(self.screen)
        self.written = ""
        patch.setattr(live_rows, "screen_size", lambda: (COLUMNS, HEIGHT))
        self._patch = patch
        self.rows = LiveRows()

    def resize(self, columns: int) -> None:
        """Make the terminal narrower; it cuts its rows."""
        self.screen.resize(HEIGHT, columns)
        self._patch.setattr(live_rows, "screen_size", lambda: (columns, HEIGHT))

    def paint(self, final: list[str], open_rows: list[str]) -> str:
        """Paint, and return what was written."""
        output = io.StringIO()
        self._patch.setattr(sys, "stdout", output)
        self.rows.paint(final, open_rows)
        written = output.getvalue()
        self._stream.feed(written.replace("\n", "\r\n"))
        return written

    @property
    def lines(self) -> list[str]:
        top = [
            "".join(line[x].data for x in range(self.screen.columns)).rstrip()
            for line in self.screen.history.top
        ]
        return [*top, *(line.rstrip() for line in self.screen.display)]


@given(st.lists(st.tuples(ROWS, ROWS), min_size=1, max_size=8))
def test_screen_has_the_final_rows_and_then_the_open_ones(
    paintings: list[tuple[list[str], list[str]]],
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        terminal = Terminal(patch)
        expected: list[str] = []
        for final, open_rows in paintings:
            terminal.paint(final, open_rows)
            expected += final
        whole = [*expected, *paintings[-1][1]]
        assert terminal.lines[: len(whole)] == whole
        assert not any(terminal.lines[len(whole) :])


def test_row_that_grows_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a terminal may flicker with each word."""
    terminal = Terminal(monkeypatch)
    terminal.paint([], ["one", "tw"])
    assert terminal.paint([], ["one", "two"]) == "\x1b[?2026ho\x1b[?2026l"


def test_final_rows_stay_when_the_width_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    terminal.paint(["final"], ["open row of words", "next"])
    terminal.resize(10)
    terminal.paint([], ["open row", "of words", "next"])
    assert terminal.lines[:4] == ["final", "open row", "of words", "next"]


def test_rows_above_the_screen_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(monkeypatch)
    tall = [f"row {number}" for number in range(20)]
    terminal.paint([], tall)
    terminal.paint([], [*tall, "last"])
    terminal.paint([f"{row}!" for row in [*tall, "last"]], [])
    assert terminal.lines[:15] == tall[:15]
    assert terminal.lines[16:21] == ["row 16!", "row 17!", "row 18!", "row 19!", "last!"]
