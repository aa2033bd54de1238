"""Quantisations of the GGUF files of a repository, and the choice of one."""

import re
from collections.abc import Iterable
from pathlib import Path

from services.common.model_files.mmproj_file import is_mmproj

__all__ = [
    "QuantisationError",
    "choose_file",
    "choose_mmproj",
    "quantisation_of",
    "quantisations_of",
]

_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_FIRST_PART = "00001"
_NAME = re.compile(
    r"(?:^|[-._/])((?:UD-)?(?:I?Q\d(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|NVFP4|BF16|F16|FP16|F32))$",
    re.IGNORECASE,
)
"""Quantisation at the end of a file's name, without suffix and part number"""
_NO_MODELS = ("mmproj", "imatrix")
"""Words in the names of GGUF files that hold no language model"""
_PREFERRED_TOWERS = ("F16", "FP16", "BF16", "Q8_0", "F32")
"""Types of a vision tower by how well they serve: a tower is small, and loses by rounding"""
_PREFERRED = (
    *("Q4_K_M", "UD-Q4_K_XL", "Q4_K_S", "Q4_K_L", "Q5_K_M", "Q5_K_S", "Q4_0", "Q4_1", "MXFP4"),
    *("MXFP4_MOE", "IQ4_NL", "IQ4_XS", "Q5_0", "Q5_1", "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M"),
    *("BF16", "F16", "F32"),
)
"""Quantisations by how well they serve where nobody has chosen one: 4 bits first, then more"""


class QuantisationError(Exception):
    """The repository has no such file, or several. The message is one sentence."""


def quantisation_of(file: str) -> str | None:
    """Return the quantisation that the name of a GGUF file states, such as Q4_K_M."""
    stem = _PART.sub("", file.removesuffix(".gguf"))
    match = _NAME.search(stem)
    return None if match is None else match[1].upper()


def quantisations_of(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the models among GGUF files by quantisation, most sensible first.

    Only the first part of a split file is listed. A file whose name states none is left out.
    """
    found: dict[str, list[str]] = {}
    for file in sorted(files):
        part = _PART.search(file.removesuffix(".gguf"))
        is_model = not any(word in file.lower() for word in _NO_MODELS)
        if is_model and (part is None or part[1] == _FIRST_PART):
            name = quantisation_of(file)
            if name is not None:
                found.setdefault(name, []).append(file)
    return dict(sorted(found.items(), key=lambda item: _rank(item[0])))


def choose_file(repository: str, files: Iterable[str], wanted: str | None) -> str:
    """Return the file of a quantisation; None = the most sensible one. Raises QuantisationError."""
    files = list(files)
    found = quantisations_of(files)
    if wanted is None:
        names = next(iter(found.values()), files if len(files) == 1 else [])
    else:
        name = wanted.upper()
        names = found.get(name) or found.get(f"UD-{name}", [])
    if len(names) == 1:
        return names[0]
    if names:
        listed = " or ".join(f"{repository}/{file}" for file in names[:3])
        raise QuantisationError(
            f"{repository} has {len(names)} GGUF files of that quantisation; name one: hf:{listed}."
        )
    which = "" if wanted is None else f" {wanted.upper()}"
    there = ", ".join(found) or "none whose name states a quantisation"
    raise QuantisationError(f"{repository} has no GGUF file{which}; its quantisations: {there}.")


def choose_mmproj(files: Iterable[str]) -> str | None:
    """Return the most sensible mmproj file among GGUF files; None if there is none."""
    towers = sorted(file for file in files if is_mmproj(Path(file)))
    return min(towers, key=_rank_of_tower, default=None)


def _rank_of_tower(file: str) -> int:
    name = quantisation_of(file)
    if name not in _PREFERRED_TOWERS:
        return len(_PREFERRED_TOWERS)
    return _PREFERRED_TOWERS.index(name)


def _rank(name: str) -> tuple[int, str]:
    place = _PREFERRED.index(name) if name in _PREFERRED else len(_PREFERRED)
    return place, name
