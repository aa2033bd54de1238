"""Command line: python -m benchmarks.gpu, or make gpu-check."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import CACHE
from benchmarks.gpu.bundle import BUNDLE, use_bundle
from benchmarks.gpu.plan import PARTS, choose
from benchmarks.gpu.report import settled_parts

_LEAST_SECONDS = 45.0
_DRY_SECONDS = 600.0
"""A part has so many seconds at least: the plan's times say nothing of a CPU"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Check the GPU path on this machine: what is unknown first, within a time.",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=8.5, help="end within (default: 8.5)")
    add("--only", default="", metavar="NAME,…", help="run these parts; * stands for any letters")
    add("--rest-of", type=Path, metavar="JSON", help="leave out what passed in this report")
    add("--dry", action="store_true", help="run every part on the CPU, in tiny sizes")
    add("--list", action="store_true", help="print the parts with their times and questions")
    add("--checkpoints", type=Path, default=CACHE / "models" / "gpu")
    add("--out", type=Path, default=Path(__file__).parents[1] / "results")
    add("--bundle", type=Path, default=BUNDLE)
    return parser.parse_args()


def main() -> None:
    """Run the check; exit with 1 if a part failed or a figure is out of its bounds."""
    arguments = _arguments()
    use_bundle(arguments.bundle)
    # imported here: on a bare machine, what these import lies in the bundle
    from benchmarks.gpu.session import Limits, Session

    try:
        parts = choose(PARTS, arguments.only)
    except ValueError as error:
        raise SystemExit(f"--only: {error}") from error
    if arguments.rest_of is not None:
        settled = settled_parts(arguments.rest_of)
        parts = [part for part in parts if part.name not in settled]
    if arguments.list:
        for part in parts:
            print(f"{part.seconds:4.0f} s  {part.name:28} {part.question}")
        return
    options = ["--checkpoints", str(arguments.checkpoints), "--bundle", str(arguments.bundle)]
    session = Session(
        parts,
        arguments.out,
        [*options, *(["--dry"] if arguments.dry else [])],
        Limits(60 * arguments.minutes, least=_DRY_SECONDS if arguments.dry else _LEAST_SECONDS),
        has_estimates=not arguments.dry,
    )
    report = session.run()
    print(report.text())
    sys.exit(0 if report.is_good else 1)


if __name__ == "__main__":
    main()
