"""Vendored packages: a changed file is noticed here, and refused by browsers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from services import http_shim
from services.http_shim.documentation.pages import PAGES
from services.http_shim.documentation.vendored_packages import integrity, path_below

WEB = Path(http_shim.__file__).parent / "web"
VENDOR = WEB / "vendor"
PACKAGES: list[dict[str, Any]] = json.loads((VENDOR / "packages.json").read_text())
HASHES = {
    path_below(Path(each["package"]), name, [*each["files"]]).as_posix(): value
    for each in PACKAGES
    for name, value in each["files"].items()
}
"""Integrity of each file by its path below vendor/"""
LOADED = re.compile(r'<(?:script|link) [^>]*(?:src|href)="vendor/([^"]+)"[^>]*>')


def test_files_are_those_of_the_packages() -> None:
    own = {"packages.json", "renew.py"}
    found = {
        path.relative_to(VENDOR).as_posix(): integrity("sha384", path.read_bytes())
        for path in VENDOR.rglob("*")
        if path.is_file() and path.name not in own and "__pycache__" not in path.parts
    }
    assert found == HASHES


@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each["package"])
def test_package_names_its_version_and_comes_with_its_licence(package: dict[str, Any]) -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", package["version"])
    assert re.fullmatch(r"sha512-[\w+/]{86}==", package["integrity"])
    assert package["license"] in {"MIT", "BSD-2-Clause", "BSD-3-Clause"}
    assert any(name.startswith("LICENSE") for name in package["files"])


def test_pages_load_each_vendored_file_by_its_hash() -> None:
    """A browser refuses a file that a proxy or a broken installation changed."""
    loaded = [
        (script[1], script[0])
        for page in WEB.glob("*.html")
        for script in LOADED.finditer(page.read_text())
    ]
    minified = (".min.js", ".min.css")
    assert {path for path, _ in loaded} == {path for path in HASHES if path.endswith(minified)}
    for path, tag in loaded:
        assert f'integrity="{HASHES[path]}"' in tag
        assert f"/vendor/{path}" in PAGES
