"""Bar chart as SVG, without a plotting library."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

__all__ = ["BarChart", "bar_chart"]

_COLORS = ("#2f6fde", "#8a94a6", "#c9a227", "#6b9e78", "#b5656b")
_BAR, _GAP, _HEIGHT = 26, 30, 220
_LEFT, _TOP, _BOTTOM = 44, 84, 34


@dataclass(frozen=True, slots=True)
class BarChart:
    """Groups of bars, with one bar for each series that has a figure in the group."""

    title: str
    subtitle: str
    series: Sequence[str]
    groups: Mapping[str, Mapping[str, float]]


def bar_chart(chart: BarChart) -> str:
    """Return the chart, with a line at 1 and each figure above its bar."""
    highest = max([1.0, *(f for group in chart.groups.values() for f in group.values())])
    group_width = _BAR * len(chart.series) + _GAP
    right = _LEFT + group_width * len(chart.groups)
    width = max(right, 560)
    bottom = _TOP + _HEIGHT

    def y(figure: float) -> float:
        return bottom - figure / highest * _HEIGHT

    marks = [
        _text(_LEFT, 24, chart.title, size=15, weight="bold"),
        _text(_LEFT, 44, chart.subtitle, color="#667085"),
    ]
    for index, name in enumerate(chart.series):
        key = _LEFT + 110 * index
        marks.append(_bar(key, 56, 11, 11, index))
        marks.append(_text(key + 17, 66, name))
    for number, (name, group) in enumerate(chart.groups.items()):
        left = _LEFT + group_width * number + _GAP / 2
        for index, series in enumerate(chart.series):
            if series in group:
                x, top = left + _BAR * index, y(group[series])
                marks.append(_bar(x, top, _BAR - 3, bottom - top, index))
                marks.append(_text(x + _BAR / 2 - 1, top - 4, f"{group[series]:.2f}", center=True))
        middle = left + _BAR * len(chart.series) / 2
        marks.append(_text(middle, bottom + 20, name, center=True))
    for figure, dash in ((0.0, ""), (1.0, ' stroke-dasharray="4 3"')):
        marks.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{y(figure):.1f}" y2="{y(figure):.1f}" '
            f'stroke="#344054"{dash}/>'
        )
    marks.append(_text(_LEFT - 10, y(1.0) + 4, "1", center=True))
    size = f'width="{width}" height="{bottom + _BOTTOM}"'
    style = 'font-family="system-ui, sans-serif"'
    body = "\n".join(["<rect width='100%' height='100%' fill='white'/>", *marks])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n{body}\n</svg>\n'


def _bar(x: float, y: float, width: float, height: float, index: int) -> str:
    color = _COLORS[index % len(_COLORS)]
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width}" height="{height:.1f}" rx="1" '
        f'fill="{color}"/>'
    )


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 11,
    color: str = "#101828",
    weight: str = "normal",
    center: bool = False,
) -> str:
    anchor = ' text-anchor="middle"' if center else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" '
        f'fill="{color}"{anchor}>{escape(text)}</text>'
    )
