"""Vendored packages of the pages, as npm has them.

    python -m services.http_shim.documentation.vendored_packages [PACKAGE@VERSION…]

Without arguments the command fetches the versions that packages.json names. It writes the files,
their integrity in packages.json, and the `integrity` attributes of the pages.
"""

import base64
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePath

__all__ = ["integrity", "path_below"]

VENDOR = Path(__file__).resolve().parents[1] / "web" / "vendor"
PACKAGES = VENDOR / "packages.json"


def main() -> None:
    packages = {each["package"]: each for each in json.loads(PACKAGES.read_text())}
    for argument in sys.argv[1:]:
        name, _, version = argument.rpartition("@")
        if name not in packages:
            raise SystemExit(f"{PACKAGES} has no package {name!r}. It has {', '.join(packages)}.")
        packages[name]["version"] = version
    for name, package in packages.items():
        with tempfile.TemporaryDirectory() as folder:
            command = ["npm", "pack", "--json", f"{name}@{package['version']}"]
            packed = json.loads(subprocess.check_output(command, cwd=folder))[0]
            archive = Path(folder, packed["filename"])
            package["integrity"] = integrity("sha512", archive.read_bytes())
            package["files"] = extract(archive, VENDOR / name, list(package["files"]))
    PACKAGES.write_text(json.dumps(list(packages.values()), indent=2) + "\n")


def path_below(target: Path, name: str, names: Sequence[str]) -> Path:
    """Return the path of a package's file: relative to the first one's folder, else its name."""
    file, folder = PurePath(name), PurePath(names[0]).parent
    return target / (file.relative_to(folder) if file.is_relative_to(folder) else file.name)


def extract(archive: Path, target: Path, names: list[str]) -> dict[str, str]:
    """Write these files of an npm package into `target`; return the integrity of each."""
    hashes = {}
    with tarfile.open(archive) as opened:
        for name in names:
            member = opened.extractfile(f"package/{name}")
            assert member is not None
            content = member.read()
            hashes[name] = integrity("sha384", content)
            file = path_below(target, name, names)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            write_integrity(file.relative_to(VENDOR.parent).as_posix(), hashes[name])
    return hashes


def write_integrity(path: str, value: str) -> None:
    """Replace the `integrity` of the scripts and style sheets at `path`."""
    for page in VENDOR.parent.glob("*.html"):
        pattern = rf'((?:src|href)="{re.escape(path)}" integrity=")[^"]*'
        page.write_text(re.sub(pattern, rf"\g<1>{value}", page.read_text()))


def integrity(algorithm: str, content: bytes) -> str:
    """Return the hash as in the `integrity` attribute of HTML and in npm's lock files."""
    digest = base64.b64encode(hashlib.new(algorithm, content).digest()).decode()
    return f"{algorithm}-{digest}"


if __name__ == "__main__":
    main()
