"""Markdown rendered as rows of a terminal."""

import sys
from collections.abc import Iterable, Sequence
from typing import ClassVar

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, ListItem, Markdown, MarkdownElement
from rich.padding import Padding
from rich.segment import Segment
from rich.style import Style
from rich.syntax import Syntax
from rich.text import Text

from tokenwire.cli.chat.markdown_units import PARSER, Unit

__all__ = ["RowRenderer"]

_LEAST_COLUMNS = 20
_CODE_INDENT = 2


class RowRenderer:
    """Renderer of units and texts for the terminal of stdout. NO_COLOR leaves bold and dim."""

    def __init__(self) -> None:
        self._console = Console(file=sys.stdout, highlight=False, legacy_windows=False)

    def unit_rows(self, unit: Unit, columns: int) -> list[str]:
        """Return the rows of a unit, with an empty one in front where it needs that."""
        rows = self._rows(_Markdown(unit.source), columns)
        return rows if unit.follows_closely or not rows else ["", *rows]

    def text_rows(self, text: str, columns: int, style: str = "") -> list[str]:
        """Return the rows of a text without markup."""
        return self._rows(Text(text, style), columns)

    def _rows(self, content: Markdown | Text, columns: int) -> list[str]:
        # one column stays free: terminals differ in where the cursor is after the last one
        width = max(columns - 1, _LEAST_COLUMNS)
        options = self._console.options.update(width=width, height=None)
        rows = self._console.render_lines(content, options, pad=False)
        return _trimmed([self._written(row) for row in rows])

    def _written(self, row: Iterable[Segment]) -> str:
        """Return a row in ANSI, without spaces at its end."""
        segments = list(Segment.simplify(row))
        while segments and not segments[-1].text.strip(" "):
            segments.pop()
        if segments and _is_plain(segments[-1].style):
            segments[-1] = Segment(segments[-1].text.rstrip(" "), segments[-1].style)
        system, no_color = self._console._color_system, self._console.no_color
        return "".join(
            segment.text
            if segment.style is None
            else _coloured(segment.style, no_color).render(segment.text, color_system=system)
            for segment in segments
        )


def _coloured(style: Style, no_color: bool) -> Style:
    return style.without_color if no_color else style


def _is_plain(style: Style | None) -> bool:
    return style is None or not (style.bgcolor or style.underline or style.reverse)


def _trimmed(rows: Sequence[str]) -> list[str]:
    """Return the rows without empty ones at both ends."""
    filled = [index for index, row in enumerate(rows) if row]
    return list(rows[filled[0] : filled[-1] + 1]) if filled else []


class _Heading(Heading):
    """Heading at the left, which needs no width."""

    LEVEL_ALIGN = dict.fromkeys(Heading.LEVEL_ALIGN, "left")


class _Code(CodeBlock):
    """Code with colours of the terminal, indented, on its background."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        colours = Syntax(
            code, self.lexer_name, theme="ansi_dark", background_color="default", word_wrap=True
        )
        yield Padding(colours, (0, 0, 0, _CODE_INDENT))


class _Item(ListItem):
    """Item of a list, with a period after its number."""

    def render_number(
        self, console: Console, options: ConsoleOptions, number: int, last_number: int
    ) -> RenderResult:
        mark = f" {number}. "
        inner = options.update(width=max(options.max_width - len(mark), 1))
        style = console.get_style("markdown.item.number", default="none")
        rows = console.render_lines(self.elements, inner, style=self.style)
        for index, row in enumerate(rows):
            yield Segment(mark if index == 0 else " " * len(mark), style)
            yield from row
            yield Segment("\n")


class _Markdown(Markdown):
    """Markdown of a model: links show their address, and HTML is text."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
        "fence": _Code,
        "code_block": _Code,
        "list_item_open": _Item,
    }

    def __init__(self, source: str) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = PARSER.parse(source)
