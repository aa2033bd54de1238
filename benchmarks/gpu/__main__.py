"""Command line: python -m benchmarks.gpu, or make gpu-check."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks import CACHE
from benchmarks.gpu.bundle import BUNDLE, use_bundle


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description="Check the GPU path on this machine: correctness, then speed beside peers.",
    )
    parser.add_argument("--minutes", type=float, default=24.0, help="end within (default: 24)")
    parser.add_argument("--models", default="1b,8b", help="some of 1b, 8b (default: both)")
    parser.add_argument(
        "--only", default="", help="run the parts whose names contain this or that: this|that"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--quick", action="store_true", help="tiny loads, to try the check itself")
    parser.add_argument("--checkpoints", type=Path, default=CACHE / "models" / "gpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results")
    parser.add_argument("--bundle", type=Path, default=BUNDLE)
    return parser.parse_args()


def main() -> None:
    """Run the check; exit with 1 if a part failed."""
    arguments = _arguments()
    use_bundle(arguments.bundle)
    # imported here: on a bare machine, what these import lies in the bundle
    import torch

    from benchmarks.gpu.check import FULL, QUICK, Check

    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device: run this check on a machine with one")
    torch.set_grad_enabled(False)
    check = Check(
        torch.device(arguments.device),
        arguments.checkpoints,
        arguments.out,
        arguments.minutes,
        QUICK if arguments.quick else FULL,
    )
    models = ["tiny"] if arguments.quick else arguments.models.split(",")
    report = check.run(models, arguments.only)
    print(report.text())
    sys.exit(0 if report.is_good else 1)


if __name__ == "__main__":
    main()
