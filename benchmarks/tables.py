"""Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["markdown", "number"]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table. The first row is the header."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def number(figure: float | None) -> str:
    """Return a figure with three digits, or "-" if it is None."""
    if figure is None:
        return "-"
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.3g}"
