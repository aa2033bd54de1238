"""Tables on a terminal."""

from collections.abc import Sequence

from tokenwire.cli.output import print_text

__all__ = ["print_table"]


def print_table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "", numbers: int = 0
) -> None:
    """Print columns as wide as their widest cell. The last `numbers` columns align at the right."""
    lines = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    first_number = len(heads) - numbers
    for line in lines:
        cells = (
            cell.ljust(width) if place < first_number else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        print_text(f"{indent}{'  '.join(cells)}".rstrip())
