"""Report of a check: a JSON file and a page of text, written anew after every row."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TypeAlias

from benchmarks.tables import markdown

__all__ = ["Figure", "Outcome", "PartResult", "Report", "settled_parts"]

Figure: TypeAlias = "str | float | int | bool | None"


class Outcome(StrEnum):
    """End of a part."""

    RUNNING = "running"
    """The part has not ended yet"""
    RAN = "ran"
    FAILED = "failed"
    """The part raised an error"""
    DIED = "died"
    """The part's process ended"""
    HUNG = "hung"
    """The part was ended because it took far longer than its estimate"""
    CUT = "cut"
    """The time of the check, or a signal, ended the part"""
    LEFT_OUT = "left out"
    """The part was not begun; `failure` says why"""


@dataclass(slots=True)
class PartResult:
    """What one part of a check found."""

    name: str
    question: str
    estimate: float
    """Seconds that the plan states"""
    outcome: Outcome = Outcome.RUNNING
    seconds: float = 0.0
    failure: str = ""
    """Why the part was left out or ended early, with the traceback"""
    rows: list[Mapping[str, Figure]] = field(default_factory=list)
    """Figures of each case by name"""
    clocks: Mapping[str, Figure] = field(default_factory=dict)
    """Clocks, power and temperature of the card while the part ran"""

    @property
    def is_good(self) -> bool:
        """True if the part ran, or was left out, and no figure is out of its bounds."""
        return self.outcome in (Outcome.RAN, Outcome.LEFT_OUT) and not self.has_bad_row

    @property
    def has_bad_row(self) -> bool:
        """True if a figure is out of its bounds."""
        return any(row.get("ok") is False for row in self.rows)


@dataclass(slots=True)
class Report:
    """A whole check, as far as it has come."""

    date: str
    commit: str
    minutes: float
    """Time within which the check ends"""
    machine: dict[str, Figure] = field(default_factory=dict)
    """The card with its clocks, and versions; empty until the first part's process has started"""
    parts: list[PartResult] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        """Write FOLDER/gpu-DATE.json and the same as text. Return the path of the JSON file.

        Each file is replaced as a whole, so a reader never finds half of one.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.stem}.json"
        _replace(path, json.dumps(asdict(self), indent=1) + "\n")
        _replace(path.with_suffix(".md"), self.text() + "\n")
        return path

    @property
    def stem(self) -> str:
        """Name of the report's files, without their endings."""
        return f"gpu-{self.date.removesuffix('+00:00').replace(':', '')}Z"

    @property
    def is_good(self) -> bool:
        """True if every part that began has ended, and all figures are within their bounds."""
        return all(part.is_good for part in self.parts)

    def text(self) -> str:
        """Return the page."""
        machine = ", ".join(f"{name} {value}" for name, value in self.machine.items())
        pieces = [
            f"# GPU check of {self.date}",
            f"Commit {self.commit}, within {self.minutes:g} minutes. {self._verdict()}",
            f"{machine or 'No process has started'}.",
        ]
        begun = [part for part in self.parts if part.outcome != Outcome.LEFT_OUT]
        for part in begun:
            pieces += _section(part)
        if left_out := [part for part in self.parts if part.outcome == Outcome.LEFT_OUT]:
            lines = [f"- {part.name}: {part.failure}" for part in left_out]
            pieces += ["## Left out", "\n".join(lines)]
        return "\n\n".join(pieces)

    def _verdict(self) -> str:
        bad = [part.name for part in self.parts if not part.is_good]
        return f"Not good: {', '.join(bad)}." if bad else "All parts that ran passed."


def settled_parts(path: Path) -> set[str]:
    """Return the names of the parts that ran in the report at `path`, with good figures."""
    return {
        part["name"]
        for part in json.loads(path.read_text())["parts"]
        if part["outcome"] == Outcome.RAN
        and all(row.get("ok") is not False for row in part["rows"])
    }


def _section(part: PartResult) -> Iterator[str]:
    spent = f"{part.seconds:.0f} s of about {part.estimate:.0f}"
    yield f"## {part.name} ({part.outcome}, {spent})"
    yield part.question
    if part.clocks:
        yield ", ".join(f"{name} {value}" for name, value in part.clocks.items()) + "."
    if part.failure:
        yield f"```\n{part.failure}\n```"
    for rows in _tables(part.rows):
        head = list(dict.fromkeys(name for row in rows for name in row))
        body = [[_text(row.get(key)) for key in head] for row in rows]
        yield markdown([head, *body])


def _tables(rows: Sequence[Mapping[str, Figure]]) -> Iterator[list[Mapping[str, Figure]]]:
    """Yield runs of rows whose first figure has the same name."""
    run: list[Mapping[str, Figure]] = []
    for row in rows:
        if run and next(iter(run[0]), None) != next(iter(row), None):
            yield run
            run = []
        run.append(row)
    if run:
        yield run


def _text(figure: Figure) -> str:
    if isinstance(figure, float):
        return f"{figure:.4g}"
    return "" if figure is None else str(figure).replace("|", "/").replace("\n", " ")


def _replace(path: Path, content: str) -> None:
    fresh = path.with_name(f"{path.name}.new")
    fresh.write_text(content)
    os.replace(fresh, path)
