"""constraints.txt: one version for each package that an installation takes."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LEFT_OUT = ("tokenwire", "torch", "triton")
"""Packages whose versions are exact already, or differ between CPUs and GPUs"""


def requirements() -> Iterator[str]:
    yield from PROJECT["build-system"]["requires"]
    yield from PROJECT["project"]["dependencies"]
    for extra in PROJECT["project"]["optional-dependencies"].values():
        yield from extra


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return dict(pairs)


@pytest.mark.parametrize("line", sorted(set(requirements())))
def test_requirement_has_a_version_in_its_range(pins: dict[str, str], line: str) -> None:
    """Without it a new release of a package changes what a fresh machine installs."""
    requirement = Requirement(line)
    name = canonicalize_name(requirement.name)
    if name not in LEFT_OUT:
        assert requirement.specifier.contains(pins[name]), f"{name}: run `make constraints`"
