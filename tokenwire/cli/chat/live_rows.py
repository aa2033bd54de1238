"""Rows at the end of a terminal's output that are repainted while they change."""

import shutil
import sys
from collections.abc import Sequence
from itertools import takewhile

from rich.cells import cell_len
from rich.text import Text

__all__ = ["LiveRows", "screen_size"]

_TOGETHER = ("\x1b[?2026h", "\x1b[?2026l")
"""Sequences between which terminals that know them show nothing half painted"""


def screen_size() -> tuple[int, int]:
    """Return columns and rows of the terminal."""
    size = shutil.get_terminal_size()
    return size.columns, size.lines


class LiveRows:
    """Painter that writes only rows that changed.

    Rows that have scrolled out of the screen stay as they are. The cursor stands behind the last
    open row, or at the beginning of a row if none is open.
    """

    def __init__(self) -> None:
        self._shown: list[str] = []
        self._columns = 0

    def paint(self, final: Sequence[str], open_rows: Sequence[str]) -> None:
        """Show `final` and then `open_rows` in place of the open rows; `final` ends here."""
        columns, height = screen_size()
        written = self._restart(columns, height)
        written += self._difference([*final, *open_rows], height)
        if final and not open_rows:
            written += "\n"
        self._shown = list(open_rows)
        if written:
            sys.stdout.write(_TOGETHER[0] + written + _TOGETHER[1])
            sys.stdout.flush()

    def _restart(self, columns: int, height: int) -> str:
        """Erase the open rows if the width changed.

        A terminal that has wrapped them anew keeps some of them above. Others cut them, and there
        a larger number would erase final rows.
        """
        written = ""
        if self._shown and columns != self._columns:
            written = _up(min(len(self._shown), height) - 1) + "\r\x1b[J"
            self._shown = []
        self._columns = columns
        return written

    def _difference(self, rows: Sequence[str], height: int) -> str:
        """Return what turns the shown rows into `rows`."""
        shown = self._shown
        same = sum(
            1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(shown, rows, strict=False))
        )
        if same == len(shown) == len(rows):
            return ""
        # what is above the screen can't be reached
        first = min(max(same, len(shown) - height), len(rows))
        if not shown:
            return "\n".join(rows)
        if first == len(shown):
            return "\n" + "\n".join(rows[first:])
        if first == len(shown) - 1 and first < len(rows) and rows[first].startswith(shown[first]):
            return "\n".join([rows[first][len(shown[first]) :], *rows[first + 1 :]])
        return self._replaced(first, rows)

    def _replaced(self, first: int, rows: Sequence[str]) -> str:
        """Return what replaces the shown rows from `first` on."""
        written = _up(len(self._shown) - 1 - first) + "\r"
        if first == len(rows):  # nothing follows: the cursor goes behind the row above
            return written + "\x1b[J" + (_behind(rows[first - 1]) if first else "")
        fresh = "\n".join(f"{row}\x1b[K" for row in rows[first:])
        return written + fresh + ("\x1b[J" if len(rows) < len(self._shown) else "")


def _up(rows: int) -> str:
    return f"\x1b[{rows}A" if rows > 0 else ""


def _behind(row: str) -> str:
    """Return what moves the cursor from the beginning of a row behind the row above."""
    width = _width(row)
    return "\x1b[A" + (f"\x1b[{width}C" if width else "")


def _width(row: str) -> int:
    return cell_len(Text.from_ansi(row).plain)
