"""Optional packages: the command that installs what an extra of Tokenwire lacks."""

import re
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution, requires

__all__ = ["install_command"]

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?:\[(?P<extras>[\w,.-]+)\])?(?P<versions>[^;]*)")
_EXTRA = re.compile(r"""\s*(?:and\s+)?extra\s*==\s*["'](?P<extra>[\w.-]+)["']""")


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra that are missing.

    It names the packages themselves, so it works for a checkout and for a wheel: Tokenwire is in
    no package index.
    """
    needed = dict(_requirements(extra))
    missing = [each for name, each in needed.items() if not _is_installed(name)]
    packages = sorted(missing or needed.values())
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def _requirements(extra: str) -> Iterator[tuple[str, str]]:
    """Yield name and requirement of each package of an extra and of the extras in it."""
    wanted = extra.replace("_", "-")
    for line in requires("tokenwire") or ():
        requirement, _, marker = line.partition(";")
        found, of = _REQUIREMENT.fullmatch(requirement.strip()), _EXTRA.search(marker)
        if found is None or of is None or of["extra"].replace("_", "-") != wanted:
            continue
        if found["name"] == "tokenwire":
            for inner in (found["extras"] or "").split(","):
                yield from _requirements(inner)
            continue
        platforms = _EXTRA.sub("", marker).strip()
        yield found["name"], f"{requirement.strip()}; {platforms}" if platforms else requirement


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
