"""A line of the terminal that is replaced while something goes on."""

import sys

__all__ = ["ProgressLine"]


class ProgressLine:
    """Line on stderr; nothing is shown if stderr is no terminal."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._shown = ""

    def __enter__(self) -> "ProgressLine":
        return self

    def __exit__(self, *failure: object) -> None:
        self.clear()

    def show(self, text: str) -> None:
        """Show a text in place of the last one."""
        if self._is_terminal and text != self._shown:
            print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)
            self._shown = text

    def clear(self) -> None:
        """Remove the text."""
        self.show("")
