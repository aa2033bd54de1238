"""Report of a check: JSON and a page of text, written anew after every part."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeAlias

from benchmarks.tables import markdown

__all__ = ["Figure", "Part", "Report"]

Figure: TypeAlias = "str | float | int | bool | None"


@dataclass(slots=True)
class Part:
    """What one part of a check found."""

    name: str
    seconds: float = 0.0
    failure: str = ""
    """Error that ended the part, empty if it ran"""
    rows: Sequence[Mapping[str, Figure]] = ()
    """A table, one row after the other, with the same keys"""

    @property
    def failed_rows(self) -> list[Mapping[str, Figure]]:
        """Rows whose figures are out of bounds."""
        return [row for row in self.rows if row.get("ok") is False]


@dataclass(slots=True)
class Report:
    """A whole check, as far as it has come."""

    date: str
    gpu: str
    torch: str
    triton: str
    commit: str
    parts: list[Part] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    """Names of the parts for which no time was left"""

    def save(self, folder: Path) -> None:
        """Write FOLDER/gpu-DATE.json and the same as text."""
        folder.mkdir(parents=True, exist_ok=True)
        stem = folder / f"gpu-{self.date.removesuffix('+00:00').replace(':', '')}Z"
        stem.with_suffix(".json").write_text(json.dumps(asdict(self), indent=1) + "\n")
        stem.with_suffix(".md").write_text(self.text() + "\n")

    def text(self) -> str:
        """Return the page."""
        about = (
            f"# GPU check of {self.date}\n\n{self.gpu}, torch {self.torch}, Triton {self.triton}, "
            f"commit {self.commit}. {self._verdict()}"
        )
        pieces = [about]
        for part in self.parts:
            pieces.append(f"## {part.name} ({part.seconds:.0f} s)")
            if part.failure:
                pieces.append(f"Failed: {part.failure}")
            if part.rows:
                head = list(dict.fromkeys(key for row in part.rows for key in row))
                body = [[_text(row.get(key)) for key in head] for row in part.rows]
                pieces.append(markdown([head, *body]))
        if self.left_out:
            pieces.append("Left out for lack of time: " + ", ".join(self.left_out) + ".")
        return "\n\n".join(pieces)

    @property
    def is_good(self) -> bool:
        """True if every part ran and all figures are within their bounds."""
        return not any(part.failure or part.failed_rows for part in self.parts)

    def _verdict(self) -> str:
        failed = [part.name for part in self.parts if part.failure or part.failed_rows]
        return "All parts passed." if not failed else f"Failed: {', '.join(failed)}."


def _text(figure: Figure) -> str:
    if isinstance(figure, float):
        return f"{figure:.4g}"
    return "" if figure is None else str(figure)
