"""Views of an answer while it is generated."""

import asyncio
import contextlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tokenwire.cli.chat.live_rows import LiveRows, screen_size
from tokenwire.cli.chat.markdown_rows import RowRenderer
from tokenwire.cli.chat.markdown_units import MarkdownUnits, Unit
from tokenwire.cli.visible_text import visible
from tokenwire.messages import ToolCall, ToolCallDelta, join_calls
from tokenwire.results import Delta

__all__ = ["AnswerView", "LiveView", "PlainView"]

_PAUSE = 0.04
"""Least seconds between two paintings"""
_SHARE = 10
"""Times that a painting took, until the next one: painting takes at most this part of a core"""
_REASONING_ROWS = 8


class AnswerView(ABC):
    """Place where an answer is shown."""

    @abstractmethod
    def add(self, delta: Delta) -> None:
        """Show a part of the answer."""

    def wait(self, text: str) -> None:  # noqa: B027 - a view may show nothing
        """Show what the answer waits for."""

    @abstractmethod
    async def end(self) -> None:
        """Show what is still missing."""


class PlainView(AnswerView):
    """Text as it comes, for what can't move a cursor. Reasoning is left out."""

    def __init__(self) -> None:
        self._calls: list[ToolCallDelta] = []
        self._is_in_row = False

    def add(self, delta: Delta) -> None:
        text = visible(delta.text) if sys.stdout.isatty() else delta.text
        if text:
            print(text, end="", flush=True)
            self._is_in_row = not text.endswith("\n")
        self._calls.extend(delta.tool_calls)

    async def end(self) -> None:
        if self._is_in_row:
            print()
        for call in join_calls(self._calls):
            print(_call_text(call))


class LiveView(AnswerView):
    """Rendered Markdown; reasoning is dimmed, and becomes one row when it ends.

    Only the last unit of the text, which may still change, is repainted.
    """

    def __init__(self, renderer: RowRenderer, *, keeps_reasoning: bool = False) -> None:
        self._renderer = renderer
        self._keeps_reasoning = keeps_reasoning
        self._rows = LiveRows()
        self._reasoning = ""
        self._reasoning_began = 0.0
        self._has_reasoned = False
        self._has_content = False
        self._has_text = False
        self._text = MarkdownUnits()
        self._calls: list[ToolCallDelta] = []
        self._changed = asyncio.Event()
        self._waiting = "…"
        self._rows.paint([], self._dim(self._waiting))
        self._painting = asyncio.create_task(self._paint_changes())

    def add(self, delta: Delta) -> None:
        if delta.reasoning:
            if not self._reasoning:
                self._reasoning_began = time.monotonic()
            self._reasoning += visible(delta.reasoning)
        self._has_text = self._has_text or bool(delta.text.strip())
        self._text.add(visible(delta.text))
        self._calls.extend(delta.tool_calls)
        self._changed.set()

    def wait(self, text: str) -> None:
        self._waiting = text
        self._changed.set()

    async def end(self) -> None:
        self._painting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._painting
        self._paint(is_last=True)

    async def _paint_changes(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            began = time.monotonic()
            self._paint(is_last=False)
            await asyncio.sleep(max(_PAUSE, _SHARE * (time.monotonic() - began)))

    def _paint(self, *, is_last: bool) -> None:
        columns, height = screen_size()
        final = self._reasoning_rows(columns, is_last=is_last)
        if self._reasoning and not self._has_reasoned and not final:
            self._rows.paint([], self._open_reasoning(columns, height))
            return
        settled, open_rows = self._text_rows(columns, height, is_last=is_last)
        final += settled
        if calls := join_calls(self._calls):
            rows = [row for call in calls for row in self._call_rows(call, columns)]
            if is_last:
                final += rows
            else:
                open_rows = [*open_rows, *rows]
        if not (final or open_rows or is_last or self._has_content):
            self._rows.paint([], self._dim(self._waiting, columns))
        elif final or open_rows or is_last:
            self._rows.paint(self._without_first_gap(final, open_rows), open_rows)

    def _without_first_gap(self, final: list[str], open_rows: list[str]) -> list[str]:
        """Drop the empty row above the first unit of an answer."""
        if not self._has_content:
            first = final or open_rows
            if first and not first[0]:
                del first[0]
            self._has_content = bool(final)
        return final

    def _reasoning_rows(self, columns: int, *, is_last: bool) -> list[str]:
        """Return what stays of the reasoning, once it has ended."""
        is_over = self._has_text or bool(self._calls) or is_last
        if not self._reasoning.strip() or self._has_reasoned or not is_over:
            return []
        self._has_reasoned = True
        seconds = time.monotonic() - self._reasoning_began
        folded = self._dim(f"Thought for {seconds:.1f} s")
        if not self._keeps_reasoning:
            return folded
        return [*self._dim(self._reasoning.strip(), columns), *folded]

    def _open_reasoning(self, columns: int, height: int) -> list[str]:
        shown = max(min(_REASONING_ROWS, height - 2), 1)
        return self._dim(self._reasoning.strip(), columns)[-shown:] or self._dim(self._waiting)

    def _text_rows(
        self, columns: int, height: int, *, is_last: bool
    ) -> tuple[list[str], list[str]]:
        """Return the rows of the units that are final, and of the one that is open."""
        if is_last:
            return self._unit_rows(self._text.take_all(), columns), []
        done, last = self._text.take()
        open_rows = self._unit_rows([last], columns)
        if last.is_table and len(open_rows) > height - 2:
            open_rows = open_rows[-max(height - 2, 1) :]
        return self._unit_rows(done, columns), open_rows

    def _unit_rows(self, parts: Sequence[Unit], columns: int) -> list[str]:
        return [row for part in parts for row in self._renderer.unit_rows(part, columns)]

    def _call_rows(self, call: ToolCall, columns: int) -> list[str]:
        return ["", *self._renderer.text_rows(visible(_call_text(call)), columns, "cyan")]

    def _dim(self, text: str, columns: int | None = None) -> list[str]:
        return self._renderer.text_rows(text, columns or screen_size()[0], "dim")


def _call_text(call: ToolCall) -> str:
    return f"→ calls {call.name}({call.arguments})"
