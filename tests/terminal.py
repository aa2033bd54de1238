"""A terminal in which tests run a command, as a person sees it."""

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pexpect
import pyte

__all__ = ["CTRL_C", "CTRL_D", "Terminal", "terminal"]

CTRL_C, CTRL_D = "\x03", "\x04"
_SECONDS = 90
_READ_BYTES = 1 << 16


class Terminal:
    """A command on an emulated screen. Rows that have scrolled away are kept."""

    def __init__(
        self, command: Sequence[str], columns: int, rows: int, variables: Mapping[str, str]
    ) -> None:
        self.raw = ""
        """All that the command has written"""
        self._columns = columns
        self._screen = pyte.HistoryScreen(columns, rows, history=10_000, ratio=0.5)
        self._stream = pyte.Stream(self._screen)
        environment = {name: each for name, each in os.environ.items() if name != "NO_COLOR"}
        self._child = pexpect.spawn(
            sys.executable,
            list(command),
            dimensions=(rows, columns),
            encoding="utf-8",
            env={**environment, "TERM": "xterm-256color", **variables},
        )
        self._child.delaybeforesend = None
        self._screen.write_process_input = self._child.send  # type: ignore[method-assign]

    @property
    def text(self) -> str:
        """All rows that were shown, as they are now."""
        top = [
            "".join(row[x].data for x in range(self._columns)).rstrip()
            for row in self._screen.history.top
        ]
        return "\n".join([*top, *(row.rstrip() for row in self._screen.display)]).rstrip()

    def enter(self, line: str) -> None:
        """Type a line."""
        self._child.send(f"{line}\r")

    def press(self, keys: str) -> None:
        """Type keys."""
        self._child.send(keys)

    def wait_for(self, pattern: str, times: int = 1) -> str:
        """Wait until the screen matches a regular expression; return the last match."""
        while len(found := re.findall(pattern, self.text, re.MULTILINE)) < times:
            self._read()
        return str(found[-1])

    def wait_for_end(self) -> int:
        """Wait until the command ends. Return its exit code."""
        try:
            while True:
                self._read()
        except EOFError:
            self._child.close()
        code: int = self._child.exitstatus
        return code

    def kill(self) -> None:
        """End the command."""
        self._child.close(force=True)

    def _read(self) -> None:
        try:
            written = self._child.read_nonblocking(_READ_BYTES, timeout=_SECONDS)
        except pexpect.TIMEOUT:
            raise AssertionError(f"the screen stays as it is:\n{self.text}") from None
        except pexpect.EOF:
            raise EOFError(f"the command has ended:\n{self.text}") from None
        self.raw += written
        self._stream.feed(written)


@contextmanager
def terminal(
    *arguments: str,
    columns: int = 80,
    rows: int = 40,
    without: str = "",
    variables: Mapping[str, str] | None = None,
) -> Iterator[Terminal]:
    """Run `tokenwire ARGUMENTS` in a terminal.

    without: package that can't be imported. variables: of the environment.
    """
    program = f"import sys; sys.modules[{without!r}] = None; from tokenwire.cli import main; main()"
    start = ("-c", program) if without else ("-m", "tokenwire")
    running = Terminal([*start, *arguments], columns, rows, variables or {})
    try:
        yield running
    finally:
        running.kill()
