"""Requirements of extras in pyproject.toml, printed so that images cache them in a layer."""

import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

PROJECT = tomllib.loads(Path("pyproject.toml").read_text())["project"]


def requirements(extras: Sequence[str]) -> Iterator[str]:
    """Yield what the extras require, and what the extras that they name require."""
    for extra in extras:
        for each in PROJECT["optional-dependencies"][extra]:
            if own := re.fullmatch(rf"{PROJECT['name']}\[(.+)\]", each):
                yield from requirements(own[1].split(","))
            else:
                yield each


print("\n".join(dict.fromkeys([*PROJECT["dependencies"], *requirements(sys.argv[1:])])))
